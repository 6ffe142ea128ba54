"""What a run tells: one line per step in metrics.jsonl and on stdout, a datagram to the agent, a bar on a terminal."""

from __future__ import annotations

import json
import os
import pty
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain_api.sync import Progress
from llmtrain_trainer.metrics.timer import PARTS
from tests.support.ranks import Job, free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def _datagrams(channel: socket.socket) -> list[Progress]:
    found = []
    while True:
        try:
            found.append(Progress.model_validate_json(channel.recv(65536)))
        except BlockingIOError:
            return found


def test_every_step_is_told_to_files_stdout_and_the_agent(new_job: Callable[..., Job], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "p.sock"))
        channel.setblocking(False)
        job = new_job(training={"steps": 7, "globalBatchSize": 4}, checkpoint={"everySteps": 3})
        fields = {"progressSocket": str(tmp_path / "p.sock")}
        gang = job.run(2, fields=fields)
        assert gang.wait() == [0, 0], gang.output()
        told = _datagrams(channel)
        again = job.run(2, fields=fields)
        assert again.wait() == [0, 0], again.output()
        done = _datagrams(channel)
    lines = job.metrics()
    printed = [line for line in gang.lines() if "event" not in line]
    assert printed == lines
    assert gang.output(1) == "", "only rank 0 speaks"
    for step, line in enumerate(lines, 1):
        assert (line["run_id"], line["attempt"], line["step"], line["tokens"]) == ("tests/job", 1, step, step * 4 * 16)
        assert tuple(line["split"]) == PARTS
        assert sum(line["split"].values()) == pytest.approx(line["step_seconds"])
        assert line["mfu"] is None, "no peak is made up for a CPU"
        assert line["memory_bytes"] == line["memory"]["peak"] >= line["memory"]["resident"] > 1 << 20
        assert line["tokens_per_second"] == pytest.approx(64 / line["step_seconds"])
        assert line["learning_rate"] > 0 and line["grad_norm"] > 0
    assert [p.step for p in told] == [*range(1, 8), 7], "one per step, and one when the last checkpoint has counted"
    assert [p.loss for p in told[:7]] == [line["loss"] for line in lines]
    assert {(p.attempt, p.first_step, p.first_step_at, p.steps, p.resumed_from) for p in told} == {
        (1, 1, lines[0]["time"], 7, -1)
    }
    commits = [p.checkpoint_step for p in told]
    assert commits == sorted(commits) and set(commits) <= {-1, 3, 6, 7} and commits[-1] == 7
    assert told[-1].checkpoint_at is not None and told[-1].checkpoint_at >= lines[-1]["time"]
    assert (done[-1].attempt, done[-1].step, done[-1].resumed_from, done[-1].checkpoint_step) == (2, 7, 7, 7)
    assert done[-1].loss == lines[-1]["loss"]
    waited = {line["step"]: line["split"]["checkpoint"] for line in lines}
    usual = statistics.median(waited[step] for step in (1, 2, 3, 5, 6))
    assert min(waited[4], waited[7]) > 2 * usual, "a save is a part of the step after it"
    phases = gang.events("started")[0]["phases"]
    assert {"rendezvous", "data", "model", "initialise", "checkpoint_verify", "first_step"} <= set(phases)


def test_a_checkpoint_that_fails_is_told_with_every_step_until_one_is_good(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "p.sock"))
        channel.setblocking(False)
        job = new_job()
        assert job.run(2, changes={"training": {"steps": 2, "schedule": {"warmupSteps": 0}}}).wait() == [0, 0]
        fields = {"progressSocket": str(tmp_path / "p.sock")}
        gang = job.launch(2, changes={"training": {"steps": 10}}, fields=fields, max_file_bytes=20_000)
        gang.until(lambda: [e["step"] for e in gang.events("checkpoint_failed")][-1:] == [10], "the last one fails")
        gang.limit_files(None)
        assert gang.wait() == [0, 0], gang.output()
        told = _datagrams(channel)
    assert [p.step for p in told] == [*range(3, 11), 10]
    assert all("could not be saved to" in p.failed_checkpoint and p.checkpoint_step == 2 for p in told[4:-1])
    assert told[0].failed_checkpoint == ""
    assert (told[-1].failed_checkpoint, told[-1].checkpoint_step) == ("", 10)


@pytest.mark.parametrize("obstacle", ["nobody listens", "the queue is full"])
def test_a_deaf_agent_never_holds_training_up(new_job: Callable[..., Job], tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "p.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        if obstacle == "the queue is full":
            channel.bind(str(path))  # and never reads; the kernel queues about ten datagrams
        gang = new_job(training={"steps": 40}).run(1, fields={"progressSocket": str(path)})
        assert gang.wait() == [0], gang.output()


def test_by_hand_on_a_terminal_a_bar_is_drawn(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job(training={"steps": 3})
    spec = {**job.spec, "checkpoint": {"store": f"file://{job.store}"}}
    place = {"attempt": 1, "globalRank": 7, "localRank": 7, "nodeRank": 0, "worldSize": 9, "localWorldSize": 1}
    where = {"masterAddress": "127.0.0.1", "masterPort": free_port(), "errorFile": str(tmp_path / "error.json")}
    document = json.dumps({"runId": "tests/hand", "spec": spec, **place, **where})
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmtrain_trainer"],
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "LLMTRAIN_LAUNCH": document,
            "LLMTRAIN_WORK_DIR": str(tmp_path / "work"),
            "OMP_NUM_THREADS": "1",
            **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},  # as torchrun sets them: they win
        },
    )
    os.close(end)
    drawn = b""
    while True:
        try:
            drawn += os.read(terminal, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
    assert process.wait(60) == 0, process.stderr.read() if process.stderr else ""
    assert b"[########################] step 3/3  loss 5." in drawn
    assert b'"loss"' not in drawn
    assert [line["step"] for line in job.metrics()] == [1, 2, 3]
