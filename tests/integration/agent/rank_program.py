"""A rank without torch: what it does is in its spec, so that the agent's tests start dozens of them in a second.

{"steps": 5, "stepSeconds": 0.01, "firstStep": 1, "checkpointEvery": 0, "exitCode": 0, "message": "",
 "ignoreSigterm": false, "sigtermSeconds": 0, "children": 0, "detachedChildren": 0, "say": "",
 "beats": false, "stuckAt": 0}
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llmtrain_api.launch import RankLaunch
from llmtrain_api.sync import Progress
from llmtrain_trainer.heartbeat import Heartbeat, dump_stacks_at_signal

_SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def run(launch: RankLaunch) -> int:
    """Do what the spec says; without `steps` run until a signal comes. Its file NAME.up tells that it is."""
    spec = launch.spec
    if spec.get("beats"):
        dump_stacks_at_signal(launch.stacks_file)
    if spec.get("ignoreSigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: _leave(spec))
    for _ in range(spec.get("children", 0)):
        subprocess.Popen(_SLEEP)
    for _ in range(spec.get("detachedChildren", 0)):
        subprocess.Popen(_SLEEP, start_new_session=True)
    if spec.get("say"):
        # One write: under PYTHONUNBUFFERED print makes two, and between them the other rank may say something.
        print(spec["say"].format(**_facts(launch)) + "\n", end="", flush=True)
    if spec.get("raise"):
        raise RuntimeError(spec["raise"])
    Path(f"{launch.error_file}.up").touch()
    _train(launch)
    if spec.get("message"):
        _tell_error(launch, spec["message"])
    return int(spec.get("exitCode", 0))


def _facts(launch: RankLaunch) -> dict[str, Any]:
    return {"rank": launch.global_rank, "attempt": launch.attempt, "environment": json.dumps(dict(os.environ))}


def _leave(spec: dict[str, Any]) -> None:
    time.sleep(spec.get("sigtermSeconds", 0))
    os._exit(spec.get("sigtermExitCode", 143))


def _train(launch: RankLaunch) -> None:
    spec = launch.spec
    steps = spec.get("steps", 1_000_000)
    first = spec.get("firstStep", 1)
    every = spec.get("checkpointEvery", 0)
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    first_at = time.time()
    heart = Heartbeat(launch.beat_file) if spec.get("beats") else None
    for step in range(first, first + steps):
        if heart:
            heart.enter("data_loading", step)
            heart.enter("sync_wait")
        while step == spec.get("stuckAt"):
            time.sleep(1)
        time.sleep(spec.get("stepSeconds", 0.01))
        if launch.global_rank != 0:
            continue
        progress = Progress(
            attempt=launch.attempt,
            step=step,
            first_step=first,
            first_step_at=first_at,
            steps=first + steps - 1,
            tokens=step * 8,
            loss=1.0 / step,
            step_at=time.time(),
            checkpoint_step=step - step % every if every else -1,
        )
        # The kernel queues ten datagrams and drops what comes after: the last word must not be among that.
        told.settimeout(30 if step == first + steps - 1 else 0)
        with contextlib.suppress(BlockingIOError):
            told.sendto(progress.model_dump_json(by_alias=True).encode(), launch.progress_socket)


def _tell_error(launch: RankLaunch, message: str) -> None:
    temporary = launch.error_file + ".tmp"
    with open(temporary, "w") as file:
        json.dump({"message": message, "exception": "ProgramError", "time": time.time(), "unknown": 1}, file)
    os.rename(temporary, launch.error_file)
