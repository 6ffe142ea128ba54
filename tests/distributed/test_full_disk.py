"""A full or failing disk stops saving, not training; only work that would be lost at the end is an error."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Gang, Job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TOO_SMALL = 20_000
"""Bytes: a shard is larger, the metrics of these runs and the logs are not."""
FORTY: dict[str, Any] = {"training": {"steps": 40}, "checkpoint": {"keep": 100}}


def _failed_steps(gang: Gang) -> list[int]:
    return [event["step"] for event in gang.events("checkpoint_failed")]


def _saved_steps(job: Job) -> list[int]:
    assert all(name.removeprefix("step-").isdigit() for name in job.checkpoints()), "nothing half-written"
    return [int(name.removeprefix("step-")) for name in job.checkpoints()]


def test_training_goes_on_and_saves_again_when_there_is_room(new_job: Callable[..., Job]) -> None:
    unhurt = new_job("unhurt", **FORTY)
    assert unhurt.run(2).wait() == [0, 0]
    for refused in ((0, 1), (0,), (1,)):
        _hurt_some_ranks(new_job(f"hurt-{'-'.join(map(str, refused))}", **FORTY), refused, unhurt.losses())


def _hurt_some_ranks(job: Job, refused: tuple[int, ...], losses: list[float]) -> None:
    gang = job.launch(2)
    gang.until(lambda: job.store.exists() and "step-00000002" in job.checkpoints(), "the first checkpoint")
    gang.limit_files(TOO_SMALL, *refused)
    gang.until(lambda: len(_failed_steps(gang)) >= 2, "two checkpoints fail")
    gang.limit_files(None)
    assert gang.wait() == [0, 0], gang.output()
    failed, saved = _failed_steps(gang), _saved_steps(job)
    assert sorted({*failed, *saved}) == list(range(2, 41, 2)), "each due checkpoint was made or told"
    assert min(saved) < min(failed) and max(failed) < max(saved) == 40
    first = gang.events("checkpoint_failed")[0]
    assert f"step {first['step']} could not be saved to {job.store}" in first["reason"]
    assert f"rank {refused[0]}: " in first["reason"] and "MiB free" in first["reason"], first
    assert "\n" not in first["reason"]
    assert job.losses() == losses


def test_the_last_checkpoint_is_tried_again_and_then_an_error(new_job: Callable[..., Job]) -> None:
    job = new_job()
    assert job.run(2, changes={"training": {"steps": 2}}).wait() == [0, 0]
    limited = job.run(2, max_file_bytes=TOO_SMALL)
    assert limited.wait() == [77, 77], limited.output()
    for rank in range(2):
        message = limited.error(rank)["message"]
        assert "step 6 could not be saved to" in message and "MiB free" in message and "tried 4 times" in message
        assert "\n" not in message
    assert _failed_steps(limited) == [4, 6, 6, 6, 6, 6], "each try is told"
    assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4, 5, 6], "training went on to its end"
    assert _saved_steps(job) == [2]
    after = job.run(2)
    assert after.wait() == [0, 0], after.output()
    assert after.events("resumed")[0] == {**after.events("resumed")[0], "step": 2, "skipped": []}
    assert _saved_steps(job) == [2, 4, 6]


def test_a_stop_waits_for_room_for_its_checkpoint(new_job: Callable[..., Job]) -> None:
    job = new_job(training={"steps": 1000}, checkpoint={"everySteps": 1000})
    gang = job.launch(2)
    gang.until_step(3)
    gang.limit_files(TOO_SMALL)
    gang.signal(signal.SIGTERM, 0)
    gang.until(lambda: bool(_failed_steps(gang)), "the checkpoint of the stop fails")
    gang.limit_files(None)
    assert gang.wait() == [143, 143], gang.output()
    assert _saved_steps(job) == [gang.events("preempted")[0]["step"]] == _failed_steps(gang)[:1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make file systems of so many bytes."""
    mounted: list[Path] = []

    def make(size: int) -> Path:
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here: not root")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _checkpoint_bytes(new_job: Callable[..., Job]) -> int:
    """Return what one checkpoint takes in pages."""
    job = new_job("measured")
    assert job.run(2).wait() == [0, 0]
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in (job.store / "step-00000006").iterdir())


def test_a_full_disk_is_foreseen_and_retention_makes_room_first(
    new_job: Callable[..., Job], small_disk: Callable[[int], Path]
) -> None:
    one = _checkpoint_bytes(new_job)
    disk = small_disk(one * 7 // 2)
    job = new_job(**{**FORTY, "checkpoint": {"keep": 3, "store": f"file://{disk}/store"}})
    gang = job.launch(2)
    gang.until_step(20)
    filler = disk / "filler"
    room = shutil.disk_usage(disk).free + 2 * one  # of the two that keep lets go, one may be filled up meanwhile
    with contextlib.suppress(OSError), filler.open("wb") as out:
        out.write(bytes(room))
    gang.until(lambda: len(_failed_steps(gang)) >= 2, "two checkpoints fail")
    filler.unlink()
    assert gang.wait() == [0, 0], gang.output()
    failed = _failed_steps(gang)
    assert min(failed) > 18, "with room for three and a half, three are kept without one that fails"
    reason = gang.events("checkpoint_failed")[-1]["reason"]
    assert f"spec.checkpoint.store file://{disk}/store is full" in reason and "fix: make room" in reason, reason
    names = sorted(path.name for path in (disk / "store").glob("step-*"))
    assert names == ["step-00000036", "step-00000038", "step-00000040"]
