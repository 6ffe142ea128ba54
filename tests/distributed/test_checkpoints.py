"""Only a checkpoint of which every byte verifies is resumed from; nothing that is not ours is touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import Job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def _flip_shard(store: Path) -> None:
    _flip(store / "step-00000006/__1_0.distcp", -5000)


def _truncate_shard(store: Path) -> None:
    shard = store / "step-00000006/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def _remove_shard(store: Path) -> None:
    (store / "step-00000006/__1_0.distcp").unlink()


def _shard_of_another_step(store: Path) -> None:
    shutil.copyfile(store / "step-00000004/__1_0.distcp", store / "step-00000006/__1_0.distcp")


def _whole_other_step(store: Path) -> None:
    shutil.rmtree(store / "step-00000006")
    shutil.copytree(store / "step-00000002", store / "step-00000006")


def _flip_metadata(store: Path) -> None:
    _flip(store / "step-00000006/.metadata", 100)


def _remove_manifest(store: Path) -> None:
    (store / "step-00000006/manifest.json").unlink()


def _empty_manifest(store: Path) -> None:
    (store / "step-00000006/manifest.json").write_bytes(b"")


def _edit_manifest(store: Path) -> None:
    manifest = store / "step-00000006/manifest.json"
    manifest.write_text(manifest.read_text().replace('"samples": 48', '"samples": 40'))


def _another_run(store: Path) -> None:
    folder = store / "step-00000006"
    from llmtrain_trainer.checkpoint import manifest as manifests

    foreign = manifests.read(folder).model_copy(update={"run_id": "tests/other"})
    (folder / "manifest.json").write_bytes(foreign.to_bytes())


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_flip_shard, "__1_0.distcp has other content than was written"),
    (_truncate_shard, "__0_0.distcp has"),
    (_remove_shard, "__1_0.distcp is missing"),
    (_shard_of_another_step, "__1_0.distcp has other content than was written"),
    (_whole_other_step, "its manifest is of step 2"),
    (_flip_metadata, ".metadata has other content than was written"),
    (_remove_manifest, "no manifest: it was never committed"),
    (_empty_manifest, "the manifest is damaged"),
    (_edit_manifest, "the manifest is damaged"),
    (_another_run, "it belongs to run 'tests/other'"),
]


def test_every_kind_of_damage_is_skipped_by_name_and_healed(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    assert job.run(2).wait() == [0, 0]
    losses = job.losses()
    whole = tmp_path / "whole"
    shutil.copytree(job.store, whole)
    for damage, reason in DAMAGES:
        shutil.rmtree(job.store)
        shutil.copytree(whole, job.store)
        damage(job.store)
        gang = job.run(2)
        assert gang.wait() == [0, 0], gang.output()
        resumed = gang.events("resumed")[0]
        assert resumed["step"] == 4, damage.__name__
        assert len(resumed["skipped"]) == 1 and f"step-00000006: {reason}" in resumed["skipped"][0], resumed
        assert job.losses() == losses, damage.__name__
        healed = job.run(2)
        assert healed.events("finished")[0].get("already") is True, f"{damage.__name__}: step 6 was saved anew"


def test_some_stay_for_good_beside_the_newest(new_job: Callable[..., Job]) -> None:
    job = new_job(training={"steps": 16}, checkpoint={"everySteps": 3, "keep": 2, "keepEverySteps": 5})
    assert job.run(2).wait() == [0, 0]
    assert job.checkpoints() == [f"step-{step:08d}" for step in (5, 10, 15, 16)]


def test_all_damaged_starts_from_the_beginning_and_half_written_is_cleared(new_job: Callable[..., Job]) -> None:
    job = new_job()
    assert job.run(2).wait() == [0, 0]
    losses = job.losses()
    for step in (2, 4, 6):
        _flip(job.store / f"step-0000000{step}/__0_0.distcp", 3000)
    half = job.store / "step-00000004.attempt-1.tmp"
    half.mkdir()
    (half / "run.json").write_text(json.dumps({"runId": job.run_id, "step": 4, "attempt": 1}))
    (half / "__0_0.distcp").write_bytes(b"half")
    gang = job.run(2)
    assert gang.wait() == [0, 0], gang.output()
    reasons = [event["reason"] for event in gang.events("checkpoint_skipped")]
    assert len(reasons) == 5 and reasons[0] == "no checkpoint verifies, so training begins anew"
    assert not gang.events("resumed")
    assert job.losses() == losses
    assert job.checkpoints() == [f"step-0000000{step}" for step in (2, 4, 6)]


def test_old_checkpoints_go_but_never_a_file_that_is_not_ours(new_job: Callable[..., Job]) -> None:
    job = new_job(checkpoint={"everySteps": 1, "keep": 2})
    job.store.mkdir()
    foreign = [job.store / "step-00000001", job.store / "step-00000099.attempt-9.tmp", job.store / "step-7.bak"]
    for folder in foreign:
        folder.mkdir()
        (folder / "mine.txt").write_text("precious")
    assert job.run(2, changes={"training": {"steps": 4}}).wait() == [0, 0]
    (job.store / "step-00000003" / "notes.txt").write_text("the good one")
    gang = job.run(2)
    assert gang.wait() == [0, 0], gang.output()
    assert {"step-00000005", "step-00000006"} <= set(job.checkpoints())
    assert [p.name for p in (job.store / "step-00000003").iterdir()] == ["notes.txt"]
    assert not (job.store / "step-00000002").exists()
    assert not (job.store / "step-00000004").exists()
    kept = [path for path in job.store.rglob("mine.txt") if path.read_text() == "precious"]
    assert len(kept) == len(foreign), sorted(map(str, job.store.rglob("*")))
