"""A worker that gets too little CPU is named by its ranks' own time, and moved to another node where that is wanted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain_kind.driver import CLUSTER_COMMAND, Driver, read_steps, run
from tests.e2e.faults import Bed
from tests.e2e.jobs import losses, small_job, wait_step
from tests.e2e.recorder import watched

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

NAMESPACE = "slow"
NAME = "throttled"
FOREVER = 100_000
QUOTA_PERCENT = 15
VERDICT_SECONDS = 90.0
"""Over what is promised, 60 s; the figure itself is printed."""


def throttle(driver: Driver, pod: str, percent: int) -> Callable[[], object]:
    """Give a worker's container that much of one CPU; return what lifts it."""
    pid = int(run(str(CLUSTER_COMMAND), "pod-pid", "--name", driver.cluster, NAMESPACE, pod, "trainer").strip())
    lines = (line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    paths = {name: path for _, names, path in lines for name in (names.split(",") if names else [""])}
    if "cpu" in paths:
        file = Path("/sys/fs/cgroup/cpu") / paths["cpu"].lstrip("/") / "cpu.cfs_quota_us"
        file.write_text(str(percent * 1000))
        return lambda: file.exists() and file.write_text("-1")
    file = Path("/sys/fs/cgroup") / paths[""].lstrip("/") / "cpu.max"
    file.write_text(f"{percent * 1000} 100000")
    return lambda: file.exists() and file.write_text("max 100000")


def test_a_throttled_worker_is_named_and_moves_to_another_node_with_no_step_lost(driver: Driver) -> None:
    bed = Bed(driver, NAMESPACE, NAME, driver.prepare_namespace(NAMESPACE))
    driver.apply(small_job(NAMESPACE, NAME, training__steps=FOREVER))
    lifted: Callable[[], object] = lambda: None  # noqa: E731 - nothing to lift yet
    try:
        with watched(driver, NAMESPACE, NAME) as watch:
            wait_step(driver, bed.store, 5)
            node = bed.node(1)
            began = time.time()
            lifted = throttle(driver, bed.pod(1), QUOTA_PERCENT)
            told = watch.wait(driver, "a verdict on the slow worker", _straggling, VERDICT_SECONDS)
            print(json.dumps({"id": "slow worker", "detection_seconds": round(time.time() - began, 1)}))
            assert f" on worker 1 ({node}) takes " in told["message"] and "for compute" in told["message"], told
            assert watch.status["attempt"] == 1, "the default only tells"
            patch = {"spec": {"failurePolicy": {"straggler": {"action": "ReplaceNode"}}}}
            driver.kubectl("patch", "ltj", NAME, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(patch))
            failure = watch.wait(driver, "a step of the next attempt", _moved, VERDICT_SECONDS)
            assert (failure["class"], failure["action"], failure["worker"]) == ("Hardware", "ReplaceNode", 1)
            assert failure["lostSteps"] == 0, failure
            assert bed.node(1) != node
            steps = losses(read_steps(bed.store))
            assert sorted(steps) == list(range(1, max(steps) + 1))
    finally:
        lifted()
        driver.kubectl("delete", "ltj", NAME, "-n", NAMESPACE, "--ignore-not-found")


def _straggling(status: dict[str, Any]) -> dict[str, Any] | None:
    found = [c for c in status.get("conditions", []) if c["type"] == "Straggling" and c["status"] == "True"]
    return found[0] if found else None


def _moved(status: dict[str, Any]) -> dict[str, Any] | None:
    found = [failure for failure in status.get("failures", []) if "secondsToNextStep" in failure]
    return found[-1] if found else None
