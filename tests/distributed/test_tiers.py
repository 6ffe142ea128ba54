"""Checkpoints near the workers: frequent, trusted only where every rank can read them, never at the store's cost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint.places import MEMORY
from tests.distributed.test_full_disk import small_disk  # noqa: F401  (a fixture)
from tests.distributed.test_resume import EXPERTS
from tests.support.ranks import Gang, Job, merged

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TWELVE: dict[str, Any] = {"training": {"steps": 12}, "checkpoint": {"everySteps": 5}}
THIRTY: dict[str, Any] = {"training": {"steps": 30}, "checkpoint": {"everySteps": 1000}}
TIERS = ("memory", "disk")
Losses = Callable[[dict[str, Any]], list[float]]


def _tiers(tmp_path: Path, *names: str, every: int = 2, keep: int = 2) -> dict[str, Any]:
    fields: dict[str, Any] = {name: {"everySteps": every, "keep": keep} for name in names}
    if "disk" in fields:
        fields["disk"]["path"] = str(tmp_path / "disk")
    return {"checkpoint": fields}


def _folders(job: Job, tier: str, tmp_path: Path) -> list[Path]:
    """Return the folders of the job's workers in a tier."""
    root = MEMORY if tier == "memory" else tmp_path / "disk"
    owner = json.loads((job.store / "owner.json").read_text())["id"]
    return sorted((root / f"llmtrain-{owner}").glob(f"worker-*-{tier}"))


def _steps(folder: Path) -> list[int]:
    names = [path.name for path in folder.iterdir() if (path / manifests.NAME).exists()]
    return sorted(int(name.removeprefix("step-")) for name in names if name[-1].isdigit())


def _resumed(gang: Gang) -> dict[str, Any]:
    return gang.events("resumed")[0]


@pytest.fixture
def make(new_job: Callable[..., Job], tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Make jobs whose tiers are removed at the end."""
    jobs: list[Job] = []

    def made(name: str, **changes: Any) -> Job:
        jobs.append(new_job(name, **changes))
        return jobs[-1]

    yield made
    for job in jobs:
        if (job.store / "owner.json").exists():
            for folder in _folders(job, "memory", tmp_path):
                shutil.rmtree(folder.parent, ignore_errors=True)


def _killed_after(job: Job, step: int, **options: Any) -> Gang:
    """Kill all ranks by SIGKILL once a step is on record."""
    gang = job.launch(2, **options)
    gang.until_step(step)
    gang.signal(signal.SIGKILL)
    gang.wait()
    return gang


def _finish(job: Job, world_size: int = 2, **options: Any) -> Gang:
    gang = job.run(world_size, **options)
    assert gang.wait() == [0] * world_size, gang.output()
    return gang


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_killed_run_goes_on_from_its_own_tier_to_the_bit(
    make: Callable[..., Job], tmp_path: Path, unhurt_losses: Losses, tier: str, model: dict[str, Any]
) -> None:
    job, near = make("hurt", **merged(TWELVE, model)), _tiers(tmp_path, tier)
    _killed_after(job, 9, changes=near)
    kept = _steps(_folders(job, tier, tmp_path)[0])
    assert max(kept) in (6, 8) and "step-00000010" not in job.checkpoints()
    resumed = _finish(job, changes=near)
    assert (_resumed(resumed)["step"], _resumed(resumed)["skipped"]) == (max(kept), [])
    assert job.losses() == unhurt_losses(merged(TWELVE, model))
    assert not _folders(job, tier, tmp_path), "a complete run gives the room back"
    assert job.checkpoints()[-1] == "step-00000012"


def _shard(folder: Path) -> Path:
    return next((folder / f"step-{max(_steps(folder)):08d}").glob("rank-*.safetensors"))


def _lost(folder: Path) -> None:
    """The worker is on a new node, or its memory was emptied."""
    shutil.rmtree(folder)


def _flipped(folder: Path) -> None:
    content = bytearray(_shard(folder).read_bytes())
    content[len(content) // 2] ^= 1
    _shard(folder).write_bytes(content)


def _cut(folder: Path) -> None:
    _shard(folder).write_bytes(_shard(folder).read_bytes()[:-7])


def _missing(folder: Path) -> None:
    _shard(folder).unlink()


def _foreign(folder: Path) -> None:
    """It was made at another time than that of the other worker."""
    step = _shard(folder).parent
    manifests.write(step, manifests.read(step).model_copy(update={"id": "another"}))


def _other_version(folder: Path) -> None:
    """A version whose ranks hold other parts, or call them otherwise."""
    step = _shard(folder).parent
    manifests.write(step, manifests.read(step).model_copy(update={"layout_fingerprint": "of another version"}))


def _torn_manifest(folder: Path) -> None:
    (_shard(folder).parent / manifests.NAME).write_bytes(b'{"format": 1')


DAMAGES = (_flipped, _cut, _missing, _foreign, _other_version, _torn_manifest)


def test_a_step_that_one_worker_cannot_read_is_nobodys(
    make: Callable[..., Job], tmp_path: Path, unhurt_losses: Losses
) -> None:
    job, near, nodes = make("hurt", **THIRTY), _tiers(tmp_path, "memory", every=1, keep=3), {"nodes": 2}
    _killed_after(job, 3, changes=near, **nodes)
    for damage in DAMAGES:
        one, other = _folders(job, "memory", tmp_path)
        hurt = max(_steps(other))
        damage(other)
        left = set(_steps(one)) & set(_steps(other)) - {hurt}
        gang = _killed_after(job, hurt + 3, changes=near, **nodes)
        assert _resumed(gang)["step"] == max(left), (damage, _resumed(gang))
        reasons = " ".join(_resumed(gang)["skipped"])
        assert f"memory step {hurt}: not " in reasons and ("rank(s) 1" in reasons or damage is _foreign), reasons
    resumed = _finish(job, changes=near, **nodes)
    assert _resumed(resumed)["step"] > 10 and job.losses() == unhurt_losses(THIRTY)


def test_each_tier_serves_when_the_faster_ones_are_lost_on_one_worker(
    make: Callable[..., Job], tmp_path: Path, unhurt_losses: Losses
) -> None:
    near = merged(
        _tiers(tmp_path, "memory", "disk", every=1, keep=1),
        {"checkpoint": {"everySteps": 7, "disk": {"everySteps": 3}}},
    )
    job, nodes = make("hurt", **THIRTY), {"nodes": 2}
    _killed_after(job, 11, changes=near, **nodes)
    _lost(_folders(job, "memory", tmp_path)[1])
    newest = max(set.intersection(*(set(_steps(folder)) for folder in _folders(job, "disk", tmp_path))))
    gang = _killed_after(job, newest + 1, changes=near, **nodes)
    assert _resumed(gang)["step"] == newest and "memory step" in " ".join(_resumed(gang)["skipped"])
    for folder in _folders(job, "memory", tmp_path):
        _lost(folder)
    hurt = _folders(job, "disk", tmp_path)[1]
    for step in _steps(hurt):
        if step != max(_steps(hurt)):
            shutil.rmtree(hurt / f"step-{step:08d}")
    _flipped(hurt)
    resumed = _finish(job, changes=near, **nodes)
    assert _resumed(resumed)["step"] % 7 == 0 and "disk step" in " ".join(_resumed(resumed)["skipped"])
    assert job.losses() == unhurt_losses(THIRTY)


def test_another_layout_goes_on_from_the_store(make: Callable[..., Job], tmp_path: Path, unhurt_losses: Losses) -> None:
    job, near = make("hurt", **TWELVE), _tiers(tmp_path, "memory")
    _killed_after(job, 9, changes=near)
    resumed = _finish(job, 1, changes=near)
    assert _resumed(resumed)["step"] == 5
    for found, expected in zip(job.losses(), unhurt_losses(TWELVE), strict=True):
        assert abs(found - expected) <= 1e-6


def test_an_emptied_store_begins_anew_whatever_the_memory_holds(make: Callable[..., Job], tmp_path: Path) -> None:
    job, near = make("job", **TWELVE), _tiers(tmp_path, "memory")
    _killed_after(job, 5, changes=near)
    (folder,) = _folders(job, "memory", tmp_path)
    shutil.rmtree(job.store)
    again = _finish(job, changes=near)
    shutil.rmtree(folder.parent)
    assert not again.events("resumed")
    assert [line["step"] for line in job.metrics()] == list(range(1, 13))


def test_a_full_tier_stops_neither_training_nor_the_store(
    make: Callable[..., Job],
    unhurt_losses: Losses,
    small_disk: Callable[[int], Path],  # noqa: F811
) -> None:
    disk, job = small_disk(200_000), make("job", **TWELVE)
    gang = _finish(job, changes={"checkpoint": {"disk": {"everySteps": 2, "path": str(disk / "tier")}}})
    failed = gang.events("checkpoint_failed")
    assert [event["step"] for event in failed] == [2, 4, 6, 8, 10]
    reason = failed[0]["reason"]
    assert f"spec.checkpoint.disk ({disk / 'tier'})" in reason and "MiB free" in reason and "fix: " in reason
    assert job.losses() == unhurt_losses(TWELVE)
    assert job.checkpoints() == ["step-00000005", "step-00000010", "step-00000012"]


def test_a_run_from_memory_still_makes_room_in_a_full_store(
    make: Callable[..., Job],
    new_job: Callable[..., Job],
    tmp_path: Path,
    unhurt_losses: Losses,
    small_disk: Callable[[int], Path],  # noqa: F811
) -> None:
    measured = new_job("measured", **TWELVE)
    _finish(measured)
    files = (measured.store / "step-00000012").iterdir()
    disk = small_disk(sum(-(-path.stat().st_size // 4096) * 4096 for path in files) * 5 // 2)
    store = {"checkpoint": {"store": f"file://{disk}/store", "everySteps": 8, "keep": 2}}
    job, near = make("job", **THIRTY), merged(store, _tiers(tmp_path, "disk", every=1))
    gang = job.launch(2, changes=near)
    gang.until(lambda: (disk / "store" / "step-00000016").exists(), "the store is full")
    tier = next((tmp_path / "disk").glob("llmtrain-*/worker-0-disk"))
    gang.until(lambda: max(_steps(tier)) > 16, "a newer step lies in the tier")
    gang.signal(signal.SIGKILL)
    gang.wait()
    resumed = _finish(job, changes=near)
    assert _resumed(resumed)["step"] > 16, "from the tier, so that the store was not read"
    assert not resumed.events("checkpoint_failed"), resumed.events("checkpoint_failed")
    assert sorted(path.name for path in (disk / "store").glob("step-*")) == ["step-00000024", "step-00000030"]


def test_a_run_that_was_killed_after_its_last_step_gives_the_room_back(
    make: Callable[..., Job], tmp_path: Path
) -> None:
    job, near = make("job", **TWELVE), _tiers(tmp_path, *TIERS)
    _killed_after(job, 5, changes=near)
    _finish(job)  # without tiers: as if it had been killed before it cleared them
    assert _folders(job, "memory", tmp_path) and _folders(job, "disk", tmp_path)
    again = _finish(job, changes=near)
    assert again.events("finished")[0].get("already")
    assert not _folders(job, "memory", tmp_path) and not _folders(job, "disk", tmp_path)


def test_kill_9_at_random_moments_with_all_tiers(
    make: Callable[..., Job], tmp_path: Path, unhurt_losses: Losses
) -> None:
    job, chance = make("hurt", **TWELVE), random.Random(7)
    near = _tiers(tmp_path, *TIERS, every=1, keep=1)
    starts = []
    for step in (2, 4, 6, 8):
        gang = job.launch(2, changes=near)
        # In the middle of a save to memory, to disk or to the store, as it comes.
        gang.until(lambda: gang.last_step() >= step + chance.randrange(2) or len(gang.codes) == 2, "a step")  # noqa: B023
        gang.signal(signal.SIGKILL, chance.randrange(2))
        assert set(gang.wait()) <= {-9, 75, 0}, gang.output()
        starts += [event["step"] for event in gang.events("resumed")]
    resumed = _finish(job, changes=near)
    assert sorted(starts) == starts and _resumed(resumed)["step"] >= 7, "a kill costs a step or two, not five"
    assert job.losses() == unhurt_losses(TWELVE)


def test_a_stop_waits_for_a_slow_tier(make: Callable[..., Job], tmp_path: Path) -> None:
    """Ranks that part while a tier's thread still talks to its peers would crash."""
    job = make("job", training={"steps": 5000}, checkpoint={"everySteps": 5000})
    gang = job.launch(2, changes=_tiers(tmp_path, "disk", every=100))
    gang.until_step(2)
    slow = tmp_path / "disk" / f"llmtrain-{json.loads((job.store / 'owner.json').read_text())['id']}" / "worker-0-disk"
    slow = slow / "step-00000100.attempt-1.tmp" / "manifest.json"
    slow.parent.mkdir(parents=True)
    os.mkfifo(slow)  # to open it lasts until somebody reads
    gang.until_step(100)
    gang.signal(signal.SIGTERM)
    gang.until(lambda: any(name > "step-00000100" for name in job.checkpoints()), "the checkpoint of the stop")
    assert not gang.codes
    os.close(os.open(slow, os.O_RDONLY))  # returns when rank 0's thread opens it, too, which then writes to nobody
    assert gang.wait() == [143, 143], gang.output()
    assert [event["step"] for event in gang.events("checkpoint_failed")] == [100]
