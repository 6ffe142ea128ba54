"""Checkpoints behind S3, against a real server: what holds for a folder holds there too."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_resume import EXPERTS
from tests.support.ranks import Gang, Job, merged
from tests.support.s3 import BUCKET, S3Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TWELVE: dict[str, Any] = {"training": {"steps": 12}, "checkpoint": {"everySteps": 3}}


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def server(_server: S3Server) -> S3Server:
    _server.kill()
    _server.start()
    return _server


@dataclass
class S3Job(Job):
    server: S3Server | None = None

    @property
    def store(self) -> Path:
        assert self.server
        return self.server.bucket / self.folder.parent.name / self.folder.name

    @property
    def uri(self) -> str:
        return f"s3://{BUCKET}/{self.folder.parent.name}/{self.folder.name}"

    def launch(self, world_size: int, **options: Any) -> Gang:
        assert self.server
        options["environment"] = {**self.server.environment, **options.get("environment", {})}
        options["changes"] = merged({"checkpoint": {"store": self.uri}}, options.get("changes", {}))
        return super().launch(world_size, **options)


@pytest.fixture
def new_s3_job(new_job: Callable[..., Job], server: S3Server) -> Callable[..., S3Job]:
    def make(name: str, **changes: Any) -> S3Job:
        job = new_job(name, **changes)
        return S3Job(job.host, job.folder, job.spec, job.run_id, work_dir=job.work_dir, server=server)

    return make


def _finish(job: Job, world_size: int = 2, **options: Any) -> Gang:
    gang = job.run(world_size, **options)
    assert gang.wait() == [0] * world_size, gang.output()
    return gang


def _resumed(gang: Gang) -> dict[str, Any]:
    return gang.events("resumed")[0]


def _saved(job: Job) -> list[int]:
    return [
        int(name.removeprefix("step-")) for name in job.checkpoints() if (job.store / name / "manifest.json").exists()
    ]


def _new_worker(job: S3Job) -> None:
    """Forget what the workers hold themselves: the next attempt runs on other nodes."""
    assert job.work_dir
    shutil.rmtree(job.work_dir)


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_killed_run_goes_on_to_the_bit(
    new_job: Callable[..., Job], new_s3_job: Callable[..., S3Job], model: dict[str, Any]
) -> None:
    whole, hurt = new_job("whole", **merged(TWELVE, model)), new_s3_job("hurt", **merged(TWELVE, model))
    _finish(whole)
    gang = hurt.launch(2)
    gang.until(lambda: hurt.store.exists() and 6 in _saved(hurt), "the second checkpoint")
    gang.signal(signal.SIGKILL, 1)
    gang.wait()
    _new_worker(hurt)
    resumed = _finish(hurt)
    assert _resumed(resumed)["step"] in (6, 9) and hurt.losses() == whole.losses()
    assert _saved(hurt) == [3, 6, 9, 12]
    assert {path.name for path in (hurt.store / "step-00000012").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
        "run.json",
    }


def test_another_layout_takes_over_and_a_folder_may_be_copied_from_it(
    new_job: Callable[..., Job], new_s3_job: Callable[..., S3Job]
) -> None:
    alone, moved = new_job("alone", **TWELVE), new_s3_job("moved", **TWELVE)
    _finish(alone, 1)
    gang = moved.launch(2)
    gang.until(lambda: moved.store.exists() and 6 in _saved(moved), "the second checkpoint")
    gang.signal(signal.SIGKILL)
    gang.wait()
    copied = new_job("copied", **TWELVE)
    copied.run_id = moved.run_id
    shutil.copytree(moved.store, copied.store)
    for job in (moved, copied):
        assert _resumed(_finish(job, 1))["step"] in (6, 9)
        assert [abs(a - b) <= 1e-6 for a, b in zip(job.losses(), alone.losses(), strict=True)] == [True] * 12


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (lambda f: _flip(f / "__1_0.distcp"), "checksum"),
    "a shard cut short": (lambda f: (f / "__0_0.distcp").write_bytes(b"short"), "has 5 bytes instead of"),
    "a missing shard": (lambda f: (f / "__1_0.distcp").unlink(), "is missing"),
    "a torn manifest": (lambda f: (f / "manifest.json").write_bytes(b"{"), "damaged"),
    "a foreign shard": (lambda f: shutil.copy(f / "__0_0.distcp", f / "__1_0.distcp"), "__1_0.distcp has"),
}


def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(new_s3_job: Callable[..., S3Job]) -> None:
    job = new_s3_job("job", **TWELVE)
    _finish(job)
    losses = job.losses()
    for name, (damage, word) in DAMAGES.items():
        damage(job.store / "step-00000012")
        resumed = _finish(job)
        assert _resumed(resumed)["step"] == 9, name
        assert word in " ".join(_resumed(resumed)["skipped"]), (name, _resumed(resumed))
        assert job.losses() == losses and _saved(job) == [3, 6, 9, 12]


def test_retention_keeps_the_newest_and_the_permanent_ones(new_s3_job: Callable[..., S3Job]) -> None:
    job = new_s3_job("job", **merged(TWELVE, {"checkpoint": {"everySteps": 2, "keep": 2, "keepEverySteps": 4}}))
    foreign = job.store / "step-00000001" / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not ours")
    _finish(job)
    assert _saved(job) == [4, 8, 10, 12] and foreign.read_text() == "not ours"


def test_mistakes_are_named(new_s3_job: Callable[..., S3Job]) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (
            {"environment": {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}},
            ("spec.checkpoint.store", "no credentials", "checkpoint.secretName"),
        ),
        ({"environment": {"AWS_SECRET_ACCESS_KEY": "wrong"}}, ("spec.checkpoint.store", "refuses", "secretName")),
        ({"changes": {"checkpoint": {"store": "s3://nowhere/x"}}}, ("'s3://nowhere/x'", "no bucket 'nowhere'", "fix:")),
    ]
    for number, (options, words) in enumerate(cases):
        gang = new_s3_job(f"job-{number}").run(1, **options)
        assert gang.wait() == [64], gang.output()
        for word in words:
            assert word in gang.error()["message"], gang.error()["message"]
    first, second = new_s3_job("first"), new_s3_job("second")
    _finish(first, 1)
    gang = second.run(1, changes={"checkpoint": {"store": first.uri}})
    assert gang.wait() == [64] and "belongs to the run 'tests/first'" in gang.error()["message"]
    assert json.loads((first.store / "owner.json").read_text())["runId"] == "tests/first"


def test_a_server_that_dies_in_mid_save_stops_saving_not_training(
    new_job: Callable[..., Job], new_s3_job: Callable[..., S3Job], server: S3Server
) -> None:
    forty: dict[str, Any] = {"training": {"steps": 400}, "checkpoint": {"everySteps": 5, "keep": 2}}
    job = new_s3_job("hurt", **forty)
    gang = job.launch(2)
    gang.until(lambda: job.store.exists() and bool(_saved(job)), "the first checkpoint")
    server.kill()
    before = gang.last_step()
    gang.until(lambda: bool(gang.events("checkpoint_failed")), "a checkpoint fails")
    gang.until(lambda: gang.last_step() > before, "training goes on")
    failed = gang.events("checkpoint_failed")[0]
    assert f"step {failed['step']} could not be saved" in failed["reason"] and "127.0.0.1" in failed["reason"], failed
    server.start()
    gang.until(lambda: any(step > failed["step"] for step in _saved(job)), "a later checkpoint is made")
    gang.signal(signal.SIGTERM)
    assert gang.wait() == [143, 143], gang.output()
    stopped = gang.events("preempted")[0]["step"]
    assert stopped == max(_saved(job)) and len(_saved(job)) == 2
    unhurt = new_job("unhurt", **merged(forty, {"checkpoint": {"everySteps": 1000}}))
    other = unhurt.launch(2)
    other.until_step(stopped)
    other.signal(signal.SIGKILL)
    other.wait()
    assert job.losses() == unhurt.losses()[:stopped], "not a bit of it changed"


def test_a_server_that_is_away_at_the_start_is_no_mistake_of_the_user(
    new_s3_job: Callable[..., S3Job], server: S3Server
) -> None:
    server.kill()
    gang = new_s3_job("job").run(1)
    assert gang.wait() == [77], gang.output()
    assert "cannot be reached" in gang.error()["message"]


def test_memory_before_s3(new_job: Callable[..., Job], new_s3_job: Callable[..., S3Job]) -> None:
    whole, hurt = new_job("whole", **TWELVE), new_s3_job("hurt", **TWELVE)
    _finish(whole)
    near: dict[str, Any] = {"checkpoint": {"everySteps": 6, "memory": {"everySteps": 2, "keep": 2}}}
    gang = hurt.launch(2, changes=near)
    gang.until_step(11)
    gang.signal(signal.SIGKILL, 0)
    gang.wait()
    resumed = _finish(hurt, changes=near)
    assert _resumed(resumed)["step"] in (8, 10) and hurt.losses() == whole.losses()
    assert _saved(hurt) == [6, 12]
