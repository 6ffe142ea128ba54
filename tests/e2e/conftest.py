"""One real cluster for all e2e tests of a session, with our images and the operator installed by its chart."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from llmtrain_kind.driver import Driver
from llmtrain_kind.stage import Phases, build_props, stage

CLUSTER = os.environ.get("LLMTRAIN_CLUSTER", "e2e")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build programs and images before the first test: on a new machine that takes longer than any test may."""
    if any("cluster" in item.keywords for item in session.items) and not session.config.option.collectonly:
        build_props()


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    """The cluster seen from outside. KEEP=1 leaves it running for a look (and for a faster next run)."""
    with stage(CLUSTER, Phases(), keep=bool(os.environ.get("KEEP"))) as driver:
        yield driver


@pytest.fixture(scope="session")
def cluster(driver: Driver) -> Driver:
    """The same, for tests that need no job."""
    return driver
