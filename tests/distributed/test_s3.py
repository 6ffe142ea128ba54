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

from llmtrain_api.constants import Env
from llmtrain_api.launch import RankLaunch
from llmtrain_api.uris import Uri
from llmtrain_trainer.checkpoint.manifest import BadCheckpoint
from llmtrain_trainer.checkpoint.objects import ObjectStore
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import UserError
from tests.distributed.test_full_disk import TOO_SMALL
from tests.distributed.test_resume import EXPERTS
from tests.support.ranks import Gang, Job, merged
from tests.support.s3 import BUCKET, S3Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TWELVE: dict[str, Any] = {"training": {"steps": 12}, "checkpoint": {"everySteps": 3}}
Losses = Callable[[dict[str, Any]], list[float]]
ALONE: dict[str, Any] = {
    "attempt": 1,
    "global_rank": 0,
    "local_rank": 0,
    "node_rank": 0,
    "world_size": 1,
    "local_world_size": 1,
    "master_address": "127.0.0.1",
    "master_port": 1,
    "error_file": "",
}


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
    return [int(name[5:13]) for name in job.checkpoints() if (job.store / name / "manifest.json").exists()]


def _new_worker(job: S3Job) -> None:
    """Forget what the workers hold themselves: the next attempt runs on other nodes."""
    assert job.work_dir
    shutil.rmtree(job.work_dir)


@pytest.fixture
def open_store(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Job], ObjectStore]:
    """Open a job's store in this process, as its one rank would."""

    def open_it(job: S3Job) -> ObjectStore:
        for name, value in {**server.environment, Env.WORK_DIR: str(tmp_path / "looking")}.items():
            monkeypatch.setenv(name, value)
        launch = RankLaunch(run_id=job.run_id, spec=merged(job.spec, {"checkpoint": {"store": job.uri}}), **ALONE)
        config = RunConfig.of(launch)
        return ObjectStore(Uri.parse(job.uri), config)

    return open_it


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_killed_run_goes_on_to_the_bit(
    new_s3_job: Callable[..., S3Job], unhurt_losses: Losses, model: dict[str, Any]
) -> None:
    job = new_s3_job("hurt", **merged(TWELVE, model))
    gang = job.launch(2)
    gang.until(lambda: job.store.exists() and 6 in _saved(job), "the second checkpoint")
    assert len(job.metrics()) >= 6, "the lines that lead up to a checkpoint are there before it is"
    gang.signal(signal.SIGKILL, 1)
    gang.wait()
    _new_worker(job)
    resumed = _finish(job)
    assert _resumed(resumed)["step"] in (6, 9) and job.losses() == unhurt_losses(merged(TWELVE, model))
    assert _saved(job) == [3, 6, 9, 12]
    assert {path.name for path in (job.store / "step-00000012.attempt-2").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
        "run.json",
    }


def test_another_layout_takes_over_and_a_folder_may_be_copied_from_it(
    new_job: Callable[..., Job], new_s3_job: Callable[..., S3Job], unhurt_losses: Losses
) -> None:
    moved, copied = new_s3_job("moved", **TWELVE), new_job("copied", **TWELVE)
    gang = moved.launch(2)
    gang.until(lambda: moved.store.exists() and 6 in _saved(moved), "the second checkpoint")
    gang.signal(signal.SIGKILL)
    gang.wait()
    copied.run_id = moved.run_id
    shutil.copytree(moved.store, copied.store)
    for job in (moved, copied):
        assert _resumed(_finish(job, 1))["step"] in (6, 9)
        assert [abs(a - b) <= 1e-6 for a, b in zip(job.losses(), unhurt_losses(TWELVE), strict=True)] == [True] * 12


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


def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(
    new_s3_job: Callable[..., S3Job], open_store: Callable[[S3Job], ObjectStore]
) -> None:
    job = new_s3_job("job", **TWELVE)
    _finish(job)
    losses, newest = job.losses(), job.store / "step-00000012.attempt-1"
    store = open_store(job)
    assert store.newest_good().manifest == store.good(12)
    for name, (damage, word) in DAMAGES.items():
        sound = {path: path.read_bytes() for path in newest.iterdir()}
        damage(newest)
        with pytest.raises(BadCheckpoint) as caught:
            store.good(12)
        assert word in str(caught.value), name
        for path, content in sound.items():
            path.write_bytes(content)
    claims = job.store / "claims"
    assert [path.name for path in claims.iterdir()] == ["00000001"]
    _flip(newest / "__1_0.distcp")
    resumed = _finish(job)
    assert _resumed(resumed)["step"] == 9 and "checksum" in " ".join(_resumed(resumed)["skipped"])
    assert job.losses() == losses and _saved(job) == [3, 6, 9, 12]
    assert not (newest / "manifest.json").exists(), "what did not verify makes way"
    newest = job.store / "step-00000012.attempt-2"
    shutil.copy(newest / "__0_0.distcp", newest / "__1_0.distcp")
    assert _resumed(_finish(job))["step"] == 9


def test_what_a_killed_upload_left_is_removed_at_the_next_start(
    new_s3_job: Callable[..., S3Job], open_store: Callable[[S3Job], ObjectStore]
) -> None:
    job = new_s3_job("job", **TWELVE)
    store = open_store(job)
    remote, key = store._remote, f"{job.uri.removeprefix(f's3://{BUCKET}/')}/step-00000003/__0_0.distcp"
    begun = remote.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
    remote.call_s3("upload_part", Bucket=BUCKET, Key=key, PartNumber=1, UploadId=begun["UploadId"], Body=b"part")
    assert store.steps() == [], "nothing of it looks like a checkpoint"
    assert len(remote.call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=key)["Uploads"]) == 1
    store.clear_unfinished()
    assert not remote.call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=key).get("Uploads")


def test_a_worker_that_sees_another_store_is_told_so(
    new_s3_job: Callable[..., S3Job], open_store: Callable[[S3Job], ObjectStore]
) -> None:
    one, other = open_store(new_s3_job("one")), open_store(new_s3_job("other"))
    owner = one.claim()
    one.expect(owner)
    with pytest.raises(UserError, match=r"does not see the store that worker 0 sees.*AWS_ENDPOINT_URL"):
        other.expect(owner)
    assert other.claim() != owner


def test_credentials_that_go_away_stop_a_save_not_the_run(
    new_s3_job: Callable[..., S3Job],
    open_store: Callable[[S3Job], ObjectStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(new_s3_job("job"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # An OSError is what a save takes for its failure; another would end the run.
    with pytest.raises(OSError, match="credentials"):  # it looks whether its claim still holds
        store.begin(2)
    store.staging_path(2).mkdir(parents=True, exist_ok=True)
    (store.staging_path(2) / "shard").write_bytes(b"x")
    with pytest.raises(OSError, match="credentials"):
        store.publish(2, ["shard"])
    with pytest.raises(UserError, match="no credentials"):
        store.claim()


def test_a_worker_without_room_for_its_shards_stops_saving_not_training(
    new_s3_job: Callable[..., S3Job], unhurt_losses: Losses
) -> None:
    job = new_s3_job("job", **merged(TWELVE, {"training": {"steps": 18}}))
    gang = job.launch(2)
    gang.until(lambda: job.store.exists() and 3 in _saved(job), "the first checkpoint")
    gang.limit_files(TOO_SMALL, 0)
    gang.until(lambda: bool(gang.events("checkpoint_failed")), "a checkpoint fails")
    gang.limit_files(None)
    assert gang.wait() == [0, 0], gang.output()
    failed = gang.events("checkpoint_failed")[0]
    assert f"could not be saved to {job.uri}/step-" in failed["reason"] and "which needs room for" in failed["reason"]
    assert max(_saved(job)) == 18 and failed["step"] not in _saved(job)
    assert job.work_dir and not list(job.work_dir.glob("s3-*/rank-*/step-*")), "no rank keeps what was in vain"
    assert job.losses() == unhurt_losses(merged(TWELVE, {"training": {"steps": 18}}))


def test_retention_keeps_the_newest_and_the_permanent_ones(new_s3_job: Callable[..., S3Job]) -> None:
    kept = {"everySteps": 2, "keep": 2, "keepEverySteps": 4}
    offline = {"wandb": {"project": "tests", "mode": "offline"}}
    job = new_s3_job("job", **merged(TWELVE, {"checkpoint": kept}), metrics=offline)
    foreign = job.store / "step-00000001" / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("not ours")
    gang = _finish(job)
    assert _saved(job) == [4, 8, 10, 12] and foreign.read_text() == "not ours"
    assert not gang.events("sink_failed"), "what wants a folder has one"
    assert job.work_dir and list(job.work_dir.glob("wandb/offline-run-*/*.wandb"))


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
    many: dict[str, Any] = {"training": {"steps": 400}, "checkpoint": {"everySteps": 5, "keep": 2}}
    job = new_s3_job("hurt", **many)
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
    unhurt = new_job("unhurt", **merged(many, {"checkpoint": {"everySteps": 1000}}))
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


def test_memory_before_s3(new_s3_job: Callable[..., S3Job], unhurt_losses: Losses) -> None:
    job = new_s3_job("hurt", **TWELVE)
    near: dict[str, Any] = {"checkpoint": {"everySteps": 6, "memory": {"everySteps": 2, "keep": 2}}}
    gang = job.launch(2, changes=near)
    gang.until_step(9)
    gang.signal(signal.SIGKILL, 0)
    gang.wait()
    resumed = _finish(job, changes=near)
    assert _resumed(resumed)["step"] in (6, 8, 10) and job.losses() == unhurt_losses(TWELVE)
    assert {6, 12} <= set(_saved(job))
