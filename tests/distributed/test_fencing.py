"""An attempt that comes back after a newer one has begun: it commits nothing, removes nothing, and says why it ends."""

from __future__ import annotations

import errno
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain_trainer.checkpoint.claims import Claim
from llmtrain_trainer.checkpoint.objects import ObjectStore
from tests.distributed.test_s3 import (  # noqa: F401 - fixtures
    S3Job,
    _server,
    new_s3_job,
    open_store,
    server,
)
from tests.support.ranks import Gang, Job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parents[1] / "golden" / "store-before-claims.tar.gz"
"""Made by commit 6b0a3c8: one checkpoint, of step 2 of 6, without any claim."""
GOLDEN_MODEL = {"dim": 8, "layers": 1, "heads": 2, "kvHeads": 1, "ffnDim": 8}
LONG: dict[str, Any] = {"training": {"steps": 400}, "checkpoint": {"everySteps": 5, "keep": 2}}
STALE = 78
POINTS = {
    "a shard is written": "step-*.tmp/*.distcp",
    "the manifest is written": "step-*.tmp/manifest.json",
    "between saves": "step-00000010",
}
S3_POINTS = {"a shard is put": "step-*[!5].attempt-1/*.distcp", "between saves": "step-00000010.*/manifest.json"}


def _content(store: Path) -> dict[str, bytes]:
    """Return every file of every checkpoint that is committed."""
    folders = (path.parent for path in store.glob("step-*/manifest.json") if not path.parent.name.endswith(".tmp"))
    return {str(path.relative_to(store)): path.read_bytes() for folder in folders for path in folder.iterdir()}


def _wakes_up_in_vain(job: Job, first: str, point: str) -> None:
    """Stop an attempt at a point, have another one train to its end, and wake the first."""
    old = job.launch(2)
    old.until(lambda: any(job.store.glob(first)), "the first checkpoint")
    old.until(lambda: any(job.store.glob(point)), point)
    old.signal(signal.SIGSTOP)
    steps = {"training": {"steps": old.last_step() + 20}}
    new = job.run(2, changes=steps)
    assert new.wait() == [0, 0], new.output()
    before = _content(job.store)
    old.signal(signal.SIGCONT)
    assert old.wait() == [STALE, STALE], old.output()
    for rank in (0, 1):
        assert old.error(rank)["exception"] == "StaleAttempt"
        assert "a newer attempt (claim 2) has the job's checkpoints" in old.error(rank)["message"]
    assert before and _content(job.store) == before
    again = job.run(2, changes=steps)
    assert again.wait() == [0, 0] and again.events("finished")[0].get("already") is True, "the newest one verifies"
    assert again.events("finished")[0]["step"] == new.events("finished")[0]["step"]


@pytest.mark.parametrize("point", POINTS)
def test_an_old_attempt_that_wakes_up_changes_nothing(new_job: Callable[..., Job], point: str) -> None:
    _wakes_up_in_vain(new_job("job", **LONG), "step-00000005", POINTS[point])


@pytest.mark.parametrize("point", S3_POINTS)
def test_nor_does_it_behind_s3(new_s3_job: Callable[..., S3Job], point: str) -> None:  # noqa: F811
    _wakes_up_in_vain(new_s3_job("job", **LONG), "step-00000005.attempt-1/manifest.json", S3_POINTS[point])


def test_a_server_that_knows_no_conditions_still_tells_who_came_first(
    new_s3_job: Callable[..., S3Job],  # noqa: F811
    open_store: Callable[[S3Job], ObjectStore],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(new_s3_job("job"))
    really = store._remote.pipe_file

    def without_conditions(key: str, content: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        really(key, content)

    claim = Claim(1, "uid", 1)
    assert store._create_claim(claim) and not store._create_claim(claim), "where the server knows them"
    monkeypatch.setattr(store._remote, "pipe_file", without_conditions)
    assert store._create_claim(Claim(2, "uid", 2)) and not store._create_claim(Claim(2, "uid", 3))


def _golden(job: Job) -> list[float]:
    job.store.mkdir(parents=True)
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(job.store, filter="data")
    gang: Gang = job.run(2)
    assert gang.wait() == [0, 0], gang.output()
    assert gang.events("resumed")[0]["step"] == 2 and not gang.events("checkpoint_skipped")
    return job.losses()


def test_a_store_from_before_there_were_claims_is_gone_on_from(
    new_job: Callable[..., Job],
    new_s3_job: Callable[..., S3Job],  # noqa: F811
) -> None:
    unhurt = new_job("unhurt", model=GOLDEN_MODEL)
    assert unhurt.run(2).wait() == [0, 0]
    folder, objects = new_job("folder", model=GOLDEN_MODEL), new_s3_job("objects", model=GOLDEN_MODEL)
    for job in (folder, objects):
        job.run_id = "tests/golden"
        assert [abs(a - b) <= 1e-5 for a, b in zip(_golden(job), unhurt.losses(), strict=True)] == [True] * 6
