from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmtrain_api.presets import PRESETS
from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint.manifest import BadCheckpoint, Manifest, entry_of
from llmtrain_trainer.checkpoint.store import SCRAP, CheckpointStore
from llmtrain_trainer.errors import CheckpointError, UserError

RUN = "team/job"


def _store(root: Path, run_id: str = RUN, attempt: int = 1) -> CheckpointStore:
    return CheckpointStore(root, uri=f"file://{root}", run_id=run_id, attempt=attempt)


def _commit(store: CheckpointStore, step: int, run_id: str = RUN) -> Path:
    staging = store.begin(step)
    shard = staging / "__0_0.distcp"
    shard.write_bytes(b"%d" % step * 1000)
    manifest = Manifest(
        run_id=run_id,
        job_uid="uid",
        attempt=1,
        step=step,
        samples=step * 8,
        loss=0.1 + 0.2,
        world_size=1,
        replicate=1,
        model=PRESETS["tiny"],
        spec_fingerprint="s",
        data_fingerprint="d",
        created_at=time.time(),
        files={shard.name: entry_of(shard)},
    )
    store.commit(manifest)
    return store.committed_path(manifest.step)


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = _commit(_store(tmp_path), 3)
    manifest = manifests.read(path)
    assert (manifest.step, manifest.samples, manifest.loss) == (3, 24, 0.1 + 0.2)
    assert manifests.verify(path, run_id=RUN, step=3) == manifest


def test_any_flipped_bit_anywhere_in_a_manifest_is_found(tmp_path: Path) -> None:
    path = _commit(_store(tmp_path), 3)
    file = path / manifests.NAME
    whole = file.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(bytes(damaged))
        with pytest.raises(BadCheckpoint, match="the manifest is damaged"):
            manifests.read(path)
    for more in (b"\n", b" ", b"\0", b"{}"):
        file.write_bytes(whole + more)
        with pytest.raises(BadCheckpoint, match="the manifest is damaged"):
            manifests.read(path)


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_torn_manifest_is_found(tmp_path: Path, cut: int) -> None:
    path = _commit(_store(tmp_path), 3)
    file = path / manifests.NAME
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(BadCheckpoint, match="damaged"):
        manifests.verify(path, run_id=RUN, step=3)


def test_the_newest_good_one_is_chosen_and_newer_ones_are_explained(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for step in (1, 2, 10, 30):
        _commit(store, step)
    (tmp_path / "step-00000030" / "__0_0.distcp").unlink()
    (tmp_path / "step-00000040").mkdir()
    found = store.newest_good()
    assert found.manifest is not None and found.manifest.step == 10
    assert found.skipped == (
        "step-00000040: no manifest: it was never committed",
        "step-00000030: __0_0.distcp is missing",
    )


def test_a_commit_is_refused_when_a_reported_shard_is_not_there(tmp_path: Path) -> None:
    store = _store(tmp_path)
    staging = store.begin(1)
    shard = staging / "__1_0.distcp"
    shard.write_bytes(b"on another disk")
    entry = entry_of(shard)
    shard.unlink()
    base = manifests.read(_commit(store, 2))
    store.begin(1)
    with pytest.raises(CheckpointError, match="do all workers share"):
        store.commit(base.model_copy(update={"step": 1, "files": {"__1_0.distcp": entry}}))
    assert not (tmp_path / "step-00000001").exists()


@pytest.mark.parametrize(
    ("keep", "bad", "permanent", "left"),
    [
        (1, (), None, [6]),
        (2, (), None, [5, 6]),
        (3, (5,), None, [3, 4, 6]),
        (9, (2,), None, [1, 3, 4, 5, 6]),
        (1, (), 2, [2, 4, 6]),
        (3, (), 3, [3, 4, 5, 6]),
        (2, (2, 3), 2, [2, 4, 5, 6]),
        (1, (), 100, [6]),
    ],
    ids=[
        "only the newest",
        "two",
        "a bad one does not count",
        "more than there are",
        "even ones stay for good",
        "what stays for good is beside the newest, or among them",
        "a bad one that stays for good",
        "none yet that stays for good",
    ],
)
def test_retire(tmp_path: Path, keep: int, bad: tuple[int, ...], permanent: int | None, left: list[int]) -> None:
    store = _store(tmp_path)
    for step in range(1, 6):
        _commit(store, step)
    for step in bad:
        for newer in range(step + 1, 6):
            (tmp_path / f"step-{newer:08d}").rename(tmp_path / f"away-{newer}")
        (tmp_path / f"step-{step:08d}" / "__0_0.distcp").write_bytes(b"damaged")
        store.newest_good()
        for newer in range(step + 1, 6):
            (tmp_path / f"away-{newer}").rename(tmp_path / f"step-{newer:08d}")
    _commit(store, 6)
    store.retire(keep, newest=6, permanent=permanent)
    assert sorted(int(p.name[5:]) for p in tmp_path.iterdir() if p.name.startswith("step-")) == left


def test_another_runs_checkpoints_are_never_removed(tmp_path: Path) -> None:
    foreign = _store(tmp_path, "team/other")
    _commit(foreign, 1, "team/other")
    foreign.begin(2)
    store = _store(tmp_path)
    store.clear_unfinished()
    _commit(store, 5)
    store.retire(1, newest=5)
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000001", "step-00000002.attempt-1.tmp", "step-00000005"}


@pytest.mark.parametrize("mark", [None, b"", b"\0\0"])
def test_one_whose_mark_is_damaged_is_still_known_for_ours_by_its_manifest(tmp_path: Path, mark: bytes | None) -> None:
    store = _store(tmp_path)
    path = _commit(store, 1)
    (path / "run.json").unlink()
    if mark is not None:
        (path / "run.json").write_bytes(mark)
    _commit(store, 2)
    store.retire(1, newest=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_unfinished_ones_of_any_attempt_are_named_and_cleared(tmp_path: Path) -> None:
    _store(tmp_path, attempt=1).begin(4)
    _store(tmp_path, attempt=2).begin(4)
    store = _store(tmp_path, attempt=3)
    assert store.unfinished() == ["step-00000004.attempt-1.tmp", "step-00000004.attempt-2.tmp"]
    store.clear_unfinished()
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_one_leaves_nothing_but_a_strangers_file(tmp_path: Path) -> None:
    store = _store(tmp_path)
    staging = store.begin(4)
    (staging / "__0_0.distcp").write_bytes(b"x" * 1000)
    store.abandon(4)
    store.abandon(4)
    assert list(tmp_path.iterdir()) == []
    store.begin(4)
    (staging / "notes.txt").write_text("mine")
    store.abandon(4)
    assert [p.name for p in staging.iterdir()] == ["notes.txt"]


def _refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(_handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)


def test_a_folder_that_could_not_be_marked_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)
    with monkeypatch.context() as broken:
        _refuse(broken, errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            store.begin(4)
    assert list(tmp_path.iterdir()) == []
    assert store.begin(4).is_dir()


def test_a_store_of_ours_that_is_full_at_a_start_is_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = _store(tmp_path).claim()

    def refuse(number: int) -> None:
        def touch(_path: Path) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "touch", touch)

    refuse(errno.ENOSPC)
    assert _store(tmp_path, attempt=2).claim() == owner
    refuse(errno.EROFS)
    with pytest.raises(UserError, match="Read-only file system"):
        _store(tmp_path, attempt=3).claim()


@pytest.mark.parametrize("times", [1, 3])
def test_a_read_that_fails_for_a_moment_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    path = _commit(_store(tmp_path), 3)
    left, really = [times], manifests._sha256

    def hiccup(file: Path) -> str:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return really(file)

    monkeypatch.setattr(manifests, "_sha256", hiccup)
    monkeypatch.setattr(manifests, "READ_PAUSES", (0.0, 0.0, 0.0))
    assert manifests.verify(path, run_id=RUN, step=3).step == 3
    left[0] = 99
    with pytest.raises(BadCheckpoint, match="cannot be read: Stale file handle"):
        manifests.verify(path, run_id=RUN, step=3)


def test_an_empty_folder_without_a_mark_goes_and_one_with_a_strangers_file_stays(tmp_path: Path) -> None:
    empty, foreign = tmp_path / "step-00000005.attempt-1.tmp", tmp_path / "step-00000006.attempt-1.tmp"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    _store(tmp_path, attempt=2).clear_unfinished()
    assert not empty.exists()
    assert (foreign / "notes.txt").read_text() == "mine"


def test_the_first_to_claim_owns_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "store"
    owner = _store(root).claim()
    assert json.loads(owner)["runId"] == RUN
    assert _store(root, attempt=2).claim() == owner
    _store(root).expect(owner)
    with pytest.raises(UserError, match=r"spec\.checkpoint\.store: .*belongs to the run 'team/job', this is 'team/x'"):
        _store(root, "team/x").claim()
    assert [p.name for p in root.iterdir()] == ["owner.json"]


def test_a_refused_run_touches_nothing_of_the_owner(tmp_path: Path) -> None:
    _store(tmp_path).claim()
    scrap = tmp_path / f"{SCRAP}of-a-claim-that-is-under-way"
    scrap.touch()
    with pytest.raises(UserError, match="belongs to the run"):
        _store(tmp_path, "team/x").claim()
    assert scrap.exists()


def test_starts_of_one_run_at_the_same_moment_do_not_refuse_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            stores = [_store(tmp_path / str(number), attempt=attempt) for attempt in range(8)]
            assert len(set(pool.map(CheckpointStore.claim, stores))) == 1


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"runId": 3}'])
def test_an_unreadable_owner_file_is_not_ours(tmp_path: Path, content: str) -> None:
    (tmp_path / "owner.json").write_text(content)
    with pytest.raises(UserError, match="belongs to the run"):
        _store(tmp_path).claim()
    assert (tmp_path / "owner.json").read_text() == content


def test_a_step_that_did_not_verify_is_replaced(tmp_path: Path) -> None:
    store = _store(tmp_path)
    damaged = _commit(store, 1)
    (damaged / "__0_0.distcp").write_bytes(b"damaged")
    (damaged / "notes.txt").write_text("mine")
    second = _store(tmp_path, attempt=2)
    assert second.newest_good().manifest is None
    _commit(second, 1)
    found = second.newest_good()
    assert found.manifest is not None and found.skipped == ()
    assert [p.read_text() for p in tmp_path.rglob("notes.txt")] == ["mine"]
