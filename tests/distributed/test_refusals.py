"""What a user can get wrong ends with exit code 64 and a message with field, value, what is allowed, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

Changes = Callable[[Path], dict[str, Any]]


def _source(uri: str) -> dict[str, Any]:
    return {"data": {"sources": [{"uri": uri}]}}


def _empty_folder(folder: Path) -> dict[str, Any]:
    (folder / "empty").mkdir()
    return _source(f"file://{folder}/empty")


def _empty_file(folder: Path) -> dict[str, Any]:
    (folder / "empty.txt").touch()
    return _source(f"file://{folder}/empty.txt")


def _too_short(folder: Path) -> dict[str, Any]:
    (folder / "short.txt").write_text("0123456789")
    return _source(f"file://{folder}/short.txt")


def _not_text(folder: Path) -> dict[str, Any]:
    (folder / "noise.txt").write_bytes(b"\xff\xfe\xfa" * 100)
    return _source(f"file://{folder}/noise.txt")


def _no_text_field(folder: Path) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text('{"text": "good"}\n{"body": "bad"}\n')
    return _source(f"file://{folder}/rows.jsonl")


def _store_is_a_file(folder: Path) -> dict[str, Any]:
    (folder / "file").touch()
    return {"checkpoint": {"store": f"file://{folder}/file"}}


def _no_tokenizer(folder: Path) -> dict[str, Any]:
    (folder / "tokenizer.json").write_text("{}")
    return {"data": {"tokenizer": {"uri": f"file://{folder}/tokenizer.json"}}}


_BATCH_7 = {"training": {"globalBatchSize": 7, "microBatchSize": 2}}

CASES: list[tuple[str, Changes, str, str]] = [
    ("data not there", lambda f: _source(f"file://{f}/nowhere"), "data.sources[0].uri", "there is nothing at"),
    ("glob without a match", lambda f: _source(f"file://{f}/*.txt"), "data.sources[0].uri", "holds no text file"),
    ("claim not mounted", lambda f: _source("pvc://corpus/en"), "data.sources[0].uri", "'corpus' is not mounted"),
    ("empty folder", _empty_folder, "data.sources[0].uri", "holds no text file"),
    ("empty file", _empty_file, "data.sources[0].uri", "all its files are empty"),
    ("less than a sequence", _too_short, "data.sources[0].uri", "hold 11 tokens"),
    ("not UTF-8", _not_text, "data.sources[0].uri", "noise.txt cannot be read"),
    ("JSON lines without text", _no_text_field, "data.sources[0].uri", "rows.jsonl line 2"),
    ("vocabulary too small", lambda f: {"model": {"vocabSize": 256}}, "model.vocabSize", "257 or more"),
    ("no tokenizer", _no_tokenizer, "data.tokenizer.uri", "is no tokenizer"),
    ("tensor on one rank", lambda f: {"parallelism": {"tensor": 2}}, "parallelism.tensor", "a divisor of 1"),
    ("kvHeads do not divide", lambda f: {"model": {"kvHeads": 3}}, "model.kvHeads", "a divisor of model.heads (4)"),
    ("batch not a multiple", lambda f: _BATCH_7, "training.globalBatchSize", "use 8"),
    ("replicate does not divide", lambda f: {"parallelism": {"replicate": 4}}, "parallelism.replicate", "divisor of 1"),
    ("store is a file", _store_is_a_file, "checkpoint.store", "cannot be written"),
    (
        "store cannot be made",
        lambda f: {"checkpoint": {"store": "file:///proc/llmtrain"}},
        "checkpoint.store",
        "cannot",
    ),
    (
        "a rule of the resource alone",
        lambda f: {"training": {"schedule": {"warmupSteps": 9}}},
        "training.schedule.warmupSteps",
        "9",
    ),
    ("a misspelt field", lambda f: {"training": {"stepps": 3}}, "stepps", "Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("changes", "field", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_mistakes_are_named(
    new_job: Callable[..., Job], tmp_path: Path, changes: Changes, field: str, words: str
) -> None:
    job = new_job()
    gang = job.run(1, changes=changes(tmp_path))
    assert gang.wait() == [64], gang.output()
    record = gang.error()
    assert field in record["message"]
    assert words in record["message"]
    assert record["exception"] in ("UserError", "ValidationError")
    if record["exception"] == "UserError":
        assert "; allowed: " in record["message"] and "; fix: " in record["message"]


def test_a_mistake_that_one_rank_finds_ends_those_that_wait_for_it(new_job: Callable[..., Job], tmp_path: Path) -> None:
    gang = new_job().run(3, changes={**_not_text(tmp_path), "training": {"globalBatchSize": 3}})
    assert gang.wait(seconds=60) == [64, 75, 75], gang.output()


def test_the_folder_of_another_run_is_refused_and_left_alone(new_job: Callable[..., Job]) -> None:
    first, second = new_job("first"), new_job("second")
    assert first.run(1).wait() == [0]
    before = {p: p.read_bytes() for p in first.store.rglob("*") if p.is_file()}
    gang = second.run(2, changes={"checkpoint": {"store": f"file://{first.store}"}})
    assert 64 in gang.wait()
    assert "belongs to the run 'tests/first', this is 'tests/second'" in gang.error()["message"]
    assert {p: p.read_bytes() for p in first.store.rglob("*") if p.is_file()} == before


def test_a_checkpoint_of_another_model_is_refused(new_job: Callable[..., Job]) -> None:
    job = new_job()
    assert job.run(2).wait() == [0, 0]
    gang = job.run(2, changes={"training": {"steps": 8}, "model": {"ffnDim": 64}})
    assert 64 in gang.wait()
    assert "spec.model.ffnDim: 64" in gang.error()["message"]
    assert "was made with 48" in gang.error()["message"]


def test_workers_that_do_not_share_the_store_or_the_data_are_told_so(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    for node in (0, 1):
        (tmp_path / f"volume-{node}").mkdir()
        (tmp_path / f"volume-{node}" / "data.txt").write_text(f"worker {node} sees this. " * 50)
    mounts = {"per_rank": lambda rank: {"volumes": {"disk": str(tmp_path / f"volume-{rank}")}}, "nodes": 2}
    job = new_job("store")
    gang = job.launch(2, changes={"checkpoint": {"store": "pvc://disk/store"}}, **mounts)
    assert gang.wait()[1] == 64, gang.output()
    assert "does not see" in gang.error(1)["message"] and "ReadWriteMany" in gang.error(1)["message"]
    job = new_job("data")
    gang = job.launch(2, changes=_source("pvc://disk/data.txt"), **mounts)
    assert gang.wait()[1] == 64, gang.output()
    assert "worker 1 holds other data than worker 0" in gang.error(1)["message"]


def test_numbers_that_are_not_finite_end_with_their_own_code(new_job: Callable[..., Job]) -> None:
    wild = {"training": {"steps": 200, "optimizer": {"learningRate": 10, "gradientClipNorm": 1e6, "weightDecay": 1}}}
    job = new_job(checkpoint={"everySteps": 1, "keep": 2}, **wild)
    gang = job.launch(2)
    assert gang.wait() == [76, 76], gang.output()
    assert "not finite" in gang.error()["message"]


def test_a_rank_that_never_comes_is_named(new_job: Callable[..., Job]) -> None:
    job = new_job(failurePolicy={"deadlines": {"startSeconds": 2}})
    gang = job.launch(1, fields={"worldSize": 2})
    assert gang.wait() == [75], gang.output()
    assert "rank 0 of 2 waited 2 s at 'rendezvous' for rank(s) 1" in gang.error()["message"]
