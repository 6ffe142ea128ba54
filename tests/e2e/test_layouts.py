"""Layouts that one worker alone cannot hold survive on the cluster: hurt, they end with the bits of an unhurt run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain_kind.driver import Driver, read_steps
from tests.e2e.jobs import losses, small_job, wait_state, wait_step

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAMESPACE = "layouts"
STEPS = 60
LAYOUTS: dict[str, dict[str, Any]] = {
    "t2p2": {"parallelism": {"tensor": 2, "pipeline": 2}},
    "experts": {"model": {"preset": "tiny-moe"}, "parallelism": {"expert": 2}},
}


@pytest.fixture(scope="module")
def folder(driver: Driver) -> Path:
    return driver.prepare_namespace(NAMESPACE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hurt_job_ends_with_the_same_bits(driver: Driver, folder: Path, layout: str) -> None:
    seen = {}
    for name in (f"{layout}-unhurt", f"{layout}-hurt"):
        driver.apply(small_job(NAMESPACE, name, training__steps=STEPS, checkpoint__everySteps=5, **LAYOUTS[layout]))
        store = folder / name
        if name.endswith("-hurt"):
            wait_step(driver, store, 12)
            driver.kill_rank(NAMESPACE, driver.workers(NAMESPACE, name)[1], 3)
            driver.wait("the second attempt", lambda: read_steps(store)[-1].attempt == 2, 120, 0.1)  # noqa: B023
            wait_step(driver, store, read_steps(store)[-1].step + 8)
            driver.delete_pod(NAMESPACE, driver.workers(NAMESPACE, name)[0])
        status = wait_state(driver, NAMESPACE, name, "Succeeded", 600)["status"]
        wanted = LAYOUTS[layout]["parallelism"]
        assert {axis: status["shape"][axis] for axis in wanted} == wanted
        seen[name.endswith("-hurt")] = losses(read_steps(store))
    assert status["restarts"]["byClass"] == {"Crash": 1, "Disruption": 1}
    assert sorted(seen[False]) == list(range(1, STEPS + 1))
    assert seen[True] == seen[False]
