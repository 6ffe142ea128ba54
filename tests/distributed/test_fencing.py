"""An attempt that comes back after a newer one has begun: it commits nothing, removes nothing, and says why it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Gang, Job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

LONG: dict[str, Any] = {"training": {"steps": 400}, "checkpoint": {"everySteps": 5, "keep": 2}}
STALE = 78


def _in_a_save(job: Job, pattern: str) -> Callable[[], bool]:
    return lambda: any(job.store.glob(pattern))


POINTS = {
    "the folder is made": "step-*.tmp/run.json",
    "a shard is written": "step-*.tmp/*.distcp",
    "the manifest is written": "step-*.tmp/manifest.json",
    "between saves": "step-00000010",
}


def _content(store: Path) -> dict[str, bytes]:
    """Return every file of what is committed: later than the metrics, which grow, and the claims, which may."""
    files = (path for path in store.glob("step-*/*") if not path.parent.name.endswith(".tmp"))
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def _paused(job: Job, point: str) -> Gang:
    gang = job.launch(2)
    gang.until(_in_a_save(job, "step-00000005"), "the first checkpoint")
    gang.until(_in_a_save(job, POINTS[point]), point)
    gang.signal(signal.SIGSTOP)
    return gang


@pytest.mark.parametrize("point", POINTS)
def test_an_old_attempt_that_wakes_up_changes_nothing(new_job: Callable[..., Job], point: str) -> None:
    job = new_job("job", **LONG)
    old = _paused(job, point)
    stopped_at = old.last_step()
    new = job.run(2, changes={"training": {"steps": stopped_at + 20}})
    assert new.wait() == [0, 0], new.output()
    before, lines = _content(job.store), job.metrics()
    old.signal(signal.SIGCONT)
    assert old.wait() == [STALE, STALE], old.output()
    for rank in (0, 1):
        assert old.error(rank)["exception"] == "StaleAttempt"
        assert "a newer attempt (claim 2) has the job's checkpoints" in old.error(rank)["message"]
    assert _content(job.store) == before
    assert job.metrics()[: len(lines)] == lines
    again = job.run(2, changes={"training": {"steps": stopped_at + 20}})
    assert again.wait() == [0, 0] and again.events("finished")[0].get("already") is True, "the newest one verifies"
    assert not again.events("checkpoint_skipped") or all(
        "half-written" in e["reason"] for e in again.events("checkpoint_skipped")
    )
