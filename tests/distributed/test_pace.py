"""Checkpoints by time: all ranks make them after the same steps, and the losses are those of any other pace."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.support.ranks import Job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

LONG: dict[str, Any] = {"training": {"steps": 80}, "checkpoint": {"everySteps": 1000, "keep": 1000}}


def _saved(job: Job) -> list[int]:
    return [int(name.removeprefix("step-")) for name in job.checkpoints()]


@pytest.fixture
def unhurt(new_job: Callable[..., Job]) -> list[float]:
    job = new_job("unhurt", **LONG)
    assert job.run(2).wait() == [0, 0]
    assert _saved(job) == [80]
    return job.losses()


def test_by_the_clock_and_at_the_best_pace(new_job: Callable[..., Job], unhurt: list[float]) -> None:
    clocked = new_job("clocked", **LONG)
    gang = clocked.run(2, changes={"checkpoint": {"everySeconds": 1, "keepEverySteps": 35}})
    assert gang.wait() == [0, 0], gang.output()
    assert clocked.losses() == unhurt
    assert {35, 70, 80} <= set(_saved(clocked))
    times = {line["step"]: line["time"] for line in clocked.metrics()}
    slowest = max(line["step_seconds"] for line in clocked.metrics())
    by_time = [step for step in _saved(clocked) if step not in (35, 70, 80)]
    for before, after in pairwise(by_time):
        assert times[after] - times[before] >= 1 - slowest, "no earlier than asked, but for the nearest step"

    auto = new_job("auto", **LONG)
    gang = auto.launch(2, changes={"checkpoint": {"pace": "auto"}})
    gang.until_step(40)
    gang.signal(signal.SIGKILL, 1)
    gang.wait()
    assert _saved(auto)[0] == 2, "the first one tells what one costs"
    again = auto.run(2, changes={"checkpoint": {"pace": "auto"}})
    assert again.wait() == [0, 0], again.output()
    resumed = again.events("resumed")[0]["step"]
    assert resumed + 2 in _saved(auto) and _saved(auto)[-1] == 80
    assert auto.losses() == unhurt
