"""Unhurt runs for all tests to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local.harness import ONE, STEPS, Run, bits, manifest

Start = Callable[..., Run]
Losses = dict[int, set[str]]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Start]:
    """Make runs that leave nothing behind, also where the test fails."""
    runs: list[Run] = []

    def make(name: str = "job", prefix: tuple[str, ...] = (), folder: Path | None = None, **changes: Any) -> Run:
        place = folder or tmp_path / f"run-{len(runs)}"
        place.mkdir(exist_ok=True)
        runs.append(Run(place, manifest(name, **changes), prefix))
        return runs[-1]

    yield make
    for run in runs:
        run.clean_up()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of a run of two workers that nobody hurt."""
    return losses_of_unhurt(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def reference_of_one(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of a run of one worker that nobody hurt."""
    return losses_of_unhurt(tmp_path_factory.mktemp("reference"), **ONE)


def losses_of_unhurt(folder: Path, **changes: Any) -> Losses:
    run = Run(folder, manifest("reference", **changes))
    run.start()
    try:
        output = run.succeed()
    finally:
        run.clean_up()
    losses = bits(run.steps())
    assert sorted(losses) == list(range(1, STEPS + 1)), output
    assert all(len(seen) == 1 for seen in losses.values())
    assert run.status()["attempt"] == 1
    run.assert_nothing_runs()
    return losses
