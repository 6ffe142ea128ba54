"""The state folder: atomic, locked, and clear about what is wrong with it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain_operator.local.processes import open_process, process_start
from llmtrain_operator.local.records import LocalStateError, Records, WorkerRecord, write_atomically

MANIFEST = {
    "apiVersion": "llmtrain.dev/v1alpha1",
    "kind": "LLMTrainJob",
    "metadata": {"name": "job", "namespace": "default"},
    "spec": {
        "workers": {"image": "image"},
        "model": {"preset": "tiny"},
        "training": {"steps": 10},
        "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
        "checkpoint": {"store": "pvc://checkpoints/job"},
    },
}
WORKER = WorkerRecord("job-w0-a1", 0, 1, 2, 4711, 99, 1.5, "http://127.0.0.1:10000")


@pytest.fixture
def records(tmp_path: Path) -> Records:
    made = Records(tmp_path / "state", "default", "job")
    made.acquire()
    return made


def test_a_new_job_gets_what_an_api_server_would_give_it(records: Records) -> None:
    made = records.new_job(MANIFEST)
    assert records.load_job() == made
    assert made["metadata"]["uid"]
    assert made["metadata"]["creationTimestamp"].endswith("Z")
    assert made["status"] == {}


@pytest.mark.parametrize(
    "content",
    ["", '{"half', "[]", "null", '{"metadata": {}}', json.dumps({**MANIFEST, "spec": {"workers": 3}}), "\x00\x01"],
    ids=["empty", "half", "list", "null", "no spec", "wrong type", "not text"],
)
def test_a_damaged_job_is_named_with_the_fix(records: Records, content: str) -> None:
    (records.folder / "job.json").write_text(content)
    with pytest.raises(LocalStateError, match=r"job\.json is damaged .*--fresh"):
        records.load_job()


def test_bytes_that_are_no_text_are_a_damaged_job(records: Records) -> None:
    (records.folder / "job.json").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(LocalStateError, match="is damaged"):
        records.load_job()


def test_only_one_controller_at_a_time(records: Records, tmp_path: Path) -> None:
    second = Records(tmp_path / "state", "default", "job")
    with pytest.raises(LocalStateError, match=r"another `llmtrain run --local` controls default\.job"):
        second.acquire()
    Records(tmp_path / "state", "default", "other").acquire()
    records.release()
    second.acquire()


def test_a_lock_is_not_inherited_by_a_worker(records: Records, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        records.release()
        Records(tmp_path / "state", "default", "job").acquire()
    finally:
        child.communicate()


def test_a_store_has_one_run(records: Records, tmp_path: Path) -> None:
    records.lock_store(tmp_path / "store")
    second = Records(tmp_path / "elsewhere", "default", "job")
    second.acquire()
    with pytest.raises(LocalStateError, match=r"spec\.checkpoint\.store: .* in use by another"):
        second.lock_store(tmp_path / "store")
    records.release()
    second.lock_store(tmp_path / "store")


def test_a_store_that_cannot_be_made_is_left_to_the_trainer(records: Records, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    records.lock_store(tmp_path / "file" / "store")


def test_a_state_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalStateError, match=r"--state .*/file: .*Not a directory; use a folder that you can write"):
        Records(tmp_path / "file", "default", "job").acquire()


def test_workers_are_found_again_and_a_damaged_record_counts_as_none(records: Records) -> None:
    for name in ("job-w0-a1", "job-w1-a1"):
        records.worker_folder(name).mkdir()
    records.save_worker(WORKER)
    (records.worker_folder("job-w1-a1") / "worker.json").write_text('{"name": "job-w1-a1"}')
    assert records.load_workers() == [WORKER]
    assert not (records.worker_folder("job-w1-a1") / "worker.json").exists()


def test_forgetting_a_job_keeps_its_volumes(records: Records) -> None:
    records.new_job(MANIFEST)
    records.worker_folder("job-w0-a1").mkdir()
    records.save_worker(WORKER)
    checkpoint = records.folder / "volumes" / "checkpoints" / "file"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("precious")
    records.forget_job()
    assert records.load_job() is None
    assert records.load_workers() == []
    assert checkpoint.read_text() == "precious"


def test_the_key_is_made_once_and_for_the_owner_only(records: Records) -> None:
    assert records.key() == records.key()
    assert len(records.key()) == 64
    assert (records.folder / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [None, "", "x", "-"], ids=["missing", "empty", "word", "sign"])
def test_a_port_that_cannot_be_read_is_none(records: Records, content: str | None) -> None:
    if content is not None:
        (records.folder / "port").write_text(content)
    assert records.port() is None


def test_a_write_that_fails_leaves_the_old_content_and_no_scrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_is_known_by_pid_and_start() -> None:
    started = process_start(os.getpid())
    assert started is not None
    descriptor = open_process(os.getpid(), started)
    assert descriptor is not None
    os.close(descriptor)
    assert open_process(os.getpid(), started + 1) is None, "the pid was given to another"


def test_a_process_that_has_ended_is_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        started = process_start(child.pid) or 0
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(child.pid) is None, "a zombie does not live"
        assert open_process(child.pid, started) is None
    assert process_start(child.pid) is None


@pytest.mark.parametrize(("namespace", "name"), [("a/b", "job"), ("default", "../../x"), ("..", "job"), ("", "job")])
def test_no_name_leads_out_of_the_state_folder(tmp_path: Path, namespace: str, name: str) -> None:
    with pytest.raises(LocalStateError, match=r"metadata\.name(space)?: .* is no name; allowed: a-z, 0-9 and '-'"):
        Records(tmp_path / "state", namespace, name)
