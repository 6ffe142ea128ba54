"""Which attempt may write: the numbers of claims, and a folder store that is fenced by them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmtrain_trainer.checkpoint import claims
from llmtrain_trainer.checkpoint.claims import Claim
from llmtrain_trainer.checkpoint.store import CheckpointStore
from llmtrain_trainer.errors import StaleAttempt
from tests.unit.trainer.checkpoint.test_store import _commit


def _entered(root: Path, attempt: int, job_uid: str = "uid") -> CheckpointStore:
    store = CheckpointStore(root, uri=f"file://{root}", run_id="team/job", attempt=attempt, job_uid=job_uid)
    store.claim()
    store.enter()
    return store


@pytest.mark.parametrize(
    ("known", "attempt", "number"),
    [
        ([], 1, 1),
        ([], 4, 4),
        ([Claim(4, "uid", 4)], 5, 5),
        ([Claim(4, "uid", 4)], 9, 9),
        ([Claim(4, "uid", 4)], 4, 5),
        ([Claim(7, "before", 7)], 1, 8),
        ([Claim(8, "uid", 1), Claim(7, "before", 7)], 2, 9),
        ([Claim(9, "", 0)], 2, 10),
    ],
    ids=["first", "earlier ones died", "next", "a gap", "twice", "job made anew", "and its next", "a torn claim"],
)
def test_numbers_rise_whatever_the_attempt_is_called(known: list[Claim], attempt: int, number: int) -> None:
    assert claims.next_number(known, "uid", attempt) == number


def test_an_older_attempt_of_the_same_job_cannot_begin(tmp_path: Path) -> None:
    _entered(tmp_path, 3)
    _entered(tmp_path, 1, "made anew")
    with pytest.raises(StaleAttempt, match=r"attempt 2 begins, but attempt 3 has"):
        _entered(tmp_path, 2)
    assert claims.parse(5, b"\0") == Claim(5, "", 0)


def test_of_starts_in_the_same_moment_one_is_the_newest(tmp_path: Path) -> None:
    stores = [
        CheckpointStore(tmp_path, uri="x", run_id="team/job", attempt=2, job_uid=str(number)) for number in range(8)
    ]

    def enter(store: CheckpointStore) -> int | None:
        try:
            return store.enter()
        except StaleAttempt:
            return None

    with ThreadPoolExecutor(8) as pool:
        numbers = [number for number in pool.map(enter, stores) if number is not None]
    assert len(set(numbers)) == len(numbers) and max(numbers) == stores[0]._claim_numbers()[0]
    assert [path.name for path in (tmp_path / "claims").iterdir() if not path.name.isdecimal()] == []


def test_old_claims_go_and_the_newest_stay(tmp_path: Path) -> None:
    for attempt in range(1, 40):
        store = _entered(tmp_path, attempt)
    assert store._claim_numbers() == list(range(39, 39 - claims.KEPT, -1))


def test_an_older_attempt_neither_begins_commits_nor_removes(tmp_path: Path) -> None:
    old = _entered(tmp_path, 1)
    for step in (1, 2, 3):
        _commit(old, step)
    staging = old.begin(4)
    (staging / "__0_0.distcp").write_bytes(b"old")
    new = _entered(tmp_path, 2)
    manifest = old.good(3).model_copy(update={"step": 4, "files": {}})
    for act in (lambda: old.commit(manifest), lambda: old.begin(5), lambda: old.retire(1, newest=3)):
        with pytest.raises(StaleAttempt, match=r"a newer attempt \(claim 2\) has the job's checkpoints"):
            act()
    with pytest.raises(StaleAttempt):
        old.clear_unfinished()
    assert new.steps() == [1, 2, 3]
    _commit(new, 4)
    new.retire(1, newest=4)
    assert new.steps() == [4]


def test_a_commit_looks_at_the_claims_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer attempt begins while the old one writes its manifest: the rename must not come."""
    old = _entered(tmp_path, 1)
    from llmtrain_trainer.checkpoint import manifest as manifests

    really = manifests.write

    def write(folder: Path, manifest: manifests.Manifest) -> None:
        really(folder, manifest)
        if not old._claim_numbers()[0] > 1:
            _entered(tmp_path, 2)

    monkeypatch.setattr(manifests, "write", write)
    with pytest.raises(StaleAttempt):
        _commit(old, 1)
    assert old.steps() == []


def test_what_a_late_rename_would_replace_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old attempt was stopped between its last look at the claims and the rename."""
    old = _entered(tmp_path, 1)
    _commit(old, 2)
    old.begin(1)
    new = _entered(tmp_path, 2)
    folder = _commit(new, 1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    looks, really = [0], old.check_current

    def look() -> None:
        looks[0] += 1
        if looks[0] > 1:
            really()

    monkeypatch.setattr(old, "check_current", look)
    with pytest.raises(StaleAttempt):
        old.commit(old.good(2).model_copy(update={"step": 1, "files": {}}))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before and new.good(1).step == 1
    folder.rename(tmp_path / "step-00000001.replaced-by-attempt-1")  # killed before it could put it back
    _entered(tmp_path, 3).clear_unfinished()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
