"""Checkpoints near the workers: frequent, trusted only where every rank can read them, never at the store's cost."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain_trainer.checkpoint.places import MEMORY
from tests.distributed.test_full_disk import small_disk  # noqa: F401  (a fixture)
from tests.distributed.test_resume import EXPERTS
from tests.support.ranks import Gang, Job, merged

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TWELVE: dict[str, Any] = {"training": {"steps": 12}, "checkpoint": {"everySteps": 5}}
TIERS = ("memory", "disk")


def _tiers(tmp_path: Path, *names: str, every: int = 2, keep: int = 2) -> dict[str, Any]:
    fields: dict[str, Any] = {name: {"everySteps": every, "keep": keep} for name in names}
    if "disk" in fields:
        fields["disk"]["path"] = str(tmp_path / "disk")
    return {"checkpoint": fields}


def _folders(job: Job, tier: str, tmp_path: Path) -> list[Path]:
    """Return the folders of the job's workers in a tier."""
    root = MEMORY if tier == "memory" else tmp_path / "disk"
    owner = json.loads((job.store / "owner.json").read_text())["id"]
    return sorted((root / f"llmtrain-{owner}").glob("worker-*"))


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name[-1].isdigit())


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


def _killed_after(job: Job, step: int, world_size: int = 2, victims: tuple[int, ...] = (), **options: Any) -> Gang:
    """Kill ranks (or all) by SIGKILL once a step is on record."""
    gang = job.launch(world_size, **options)
    gang.until_step(step)
    gang.signal(signal.SIGKILL, *victims)
    gang.wait()
    return gang


def _finish(job: Job, world_size: int = 2, **options: Any) -> Gang:
    gang = job.run(world_size, **options)
    assert gang.wait() == [0] * world_size, gang.output()
    return gang


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_killed_run_goes_on_from_its_own_tier_to_the_bit(
    make: Callable[..., Job], tmp_path: Path, tier: str, model: dict[str, Any]
) -> None:
    whole, hurt = make("whole", **merged(TWELVE, model)), make("hurt", **merged(TWELVE, model))
    _finish(whole)
    near = _tiers(tmp_path, tier)
    _killed_after(hurt, 9, changes=near)
    kept = _steps(_folders(hurt, tier, tmp_path)[0])
    assert len(kept) >= 1 and max(kept) in (6, 8) and "step-00000010" not in hurt.checkpoints()
    resumed = _finish(hurt, changes=near)
    assert (_resumed(resumed)["step"], _resumed(resumed)["skipped"]) == (max(kept), [])
    assert hurt.losses() == whole.losses()
    assert not _folders(hurt, tier, tmp_path), "a complete run gives the room back"
    assert hurt.checkpoints()[-1] == "step-00000012"


def test_both_tiers_and_the_store_each_serve_when_the_faster_ones_are_gone(
    make: Callable[..., Job], tmp_path: Path
) -> None:
    whole = make("whole", **TWELVE)
    _finish(whole)
    near = merged(_tiers(tmp_path, *TIERS), {"checkpoint": {"disk": {"everySteps": 3}}})
    for lost, newest in (((), (8,)), (("memory",), (6, 9)), (("memory", "disk"), (5,))):
        job = make(f"lost-{len(lost)}", **TWELVE)
        _killed_after(job, 9, changes=near)
        for tier in lost:
            for folder in _folders(job, tier, tmp_path):
                shutil.rmtree(folder)
        resumed = _finish(job, changes=near)
        found = _resumed(resumed)["step"]
        assert found in newest or (not lost and found == 9), (lost, found)
        assert job.losses() == whole.losses()


def _lost_node(folders: list[Path]) -> None:
    shutil.rmtree(folders[1])


def _shard(folders: list[Path], number: int = -1) -> Path:
    newest = max(_steps(folders[number]))
    return next((folders[number] / f"step-{newest:08d}").glob("rank-*.safetensors"))


def _flipped(folders: list[Path]) -> None:
    path = _shard(folders)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(folders: list[Path]) -> None:
    path = _shard(folders)
    path.write_bytes(path.read_bytes()[:-7])


def _missing(folders: list[Path]) -> None:
    _shard(folders).unlink()


def _foreign(folders: list[Path]) -> None:
    """The newest of one worker is of another course of the run."""
    path = _shard(folders).with_name("manifest.json")
    from llmtrain_trainer.checkpoint import manifest as manifests

    manifests.write(path.parent, manifests.read(path.parent).model_copy(update={"id": "another"}))


@pytest.mark.parametrize(
    ("damage", "tier"),
    [(_lost_node, "memory"), (_flipped, "memory"), (_cut, "disk"), (_missing, "disk"), (_foreign, "memory")],
)
def test_a_step_that_one_worker_cannot_read_is_nobodys(
    make: Callable[..., Job], tmp_path: Path, damage: Callable[[list[Path]], None], tier: str
) -> None:
    whole, hurt = make("whole", **TWELVE), make("hurt", **TWELVE)
    near, nodes = _tiers(tmp_path, tier, every=1), {"nodes": 2}
    _finish(whole, **nodes)
    _killed_after(hurt, 9, changes=near, **nodes)
    folders = _folders(hurt, tier, tmp_path)
    common = sorted(set(_steps(folders[0])) & set(_steps(folders[1])))
    newest = max(_steps(folders[1]))
    damage(folders)
    left = [step for step in common if step != newest] if damage is not _lost_node else []
    resumed = _finish(hurt, changes=near, **nodes)
    assert _resumed(resumed)["step"] == max([5, *left])
    reasons = " ".join(_resumed(resumed)["skipped"])
    assert f"{tier} step" in reasons and ("rank(s) 1" in reasons or damage is _foreign), reasons
    assert hurt.losses() == whole.losses()


def test_another_layout_goes_on_from_the_store(make: Callable[..., Job], tmp_path: Path) -> None:
    alone, hurt = make("alone", **TWELVE), make("hurt", **TWELVE)
    _finish(alone, 1)
    near = _tiers(tmp_path, "memory")
    _killed_after(hurt, 9, changes=near)
    resumed = _finish(hurt, 1, changes=near)
    assert _resumed(resumed)["step"] == 5
    for found, expected in zip(hurt.losses(), alone.losses(), strict=True):
        assert abs(found - expected) <= 1e-6


def test_an_emptied_store_begins_anew_whatever_the_memory_holds(make: Callable[..., Job], tmp_path: Path) -> None:
    job = make("job", **TWELVE)
    near = _tiers(tmp_path, "memory")
    _killed_after(job, 9, changes=near)
    for folder in _folders(job, "memory", tmp_path):
        moved = folder.parent
    shutil.rmtree(job.store)
    again = _finish(job, changes=near)
    assert not again.events("resumed") or _resumed(again)["step"] == 0
    assert [line["step"] for line in job.metrics()] == list(range(1, 13))
    shutil.rmtree(moved)


def test_a_full_tier_stops_neither_training_nor_the_store(
    make: Callable[..., Job],
    tmp_path: Path,
    small_disk: Callable[[int], Path],  # noqa: F811
) -> None:
    disk = small_disk(200_000)
    whole, job = make("whole", **TWELVE), make("job", **TWELVE)
    _finish(whole)
    gang = _finish(job, changes={"checkpoint": {"disk": {"everySteps": 2, "path": str(disk / "tier")}}})
    failed = gang.events("checkpoint_failed")
    assert [event["step"] for event in failed] == [2, 4, 6, 8, 10]
    assert f"spec.checkpoint.disk ({disk / 'tier'})" in failed[0]["reason"] and "MiB free" in failed[0]["reason"]
    assert job.losses() == whole.losses()
    assert job.checkpoints() == ["step-00000005", "step-00000010", "step-00000012"]


def test_kill_9_at_random_moments_with_all_tiers(make: Callable[..., Job], tmp_path: Path) -> None:
    whole, hurt = make("whole", **TWELVE), make("hurt", **TWELVE)
    _finish(whole)
    near = _tiers(tmp_path, *TIERS, every=1, keep=1)
    starts = []
    for step, victim in ((3, 0), (5, 1), (8, 0)):
        gang = hurt.launch(2, changes=near)
        gang.until(lambda: gang.last_step() >= step or len(gang.codes) == 2, "a step")  # noqa: B023
        gang.signal(signal.SIGKILL, victim)
        assert set(gang.wait()) <= {-9, 75, 0}, gang.output()
        starts += [event["step"] for event in gang.events("resumed")]
    resumed = _finish(hurt, changes=near)
    assert sorted(starts) == starts and _resumed(resumed)["step"] >= 7, "a kill costs a step or two, not five"
    assert hurt.losses() == whole.losses()
