"""Runs of the trainer as users have them: a process per run, and what it prints for each step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 150
"""After which a process is ended: a check that hangs has failed."""
TEXT = "".join(f"{n} squared is {n * n}, and its cube is {n**3}.\n" for n in range(40_000))


class RunError(Exception):
    """A process of a check did not do what it had to."""


@dataclass
class Run:
    """What a run left."""

    store: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Records of metrics.jsonl."""
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


@dataclass(frozen=True)
class Bench:
    """Where runs lie and what they run on."""

    folder: Path
    device: str
    done: dict[tuple[str, str], Run] = field(default_factory=dict)
    """Runs by name and device: what is asked for again is not run again."""

    def train(self, name: str, model: dict[str, Any], steps: int, **changes: Any) -> Run:
        """Run so many steps on one rank, and end the process then: a last checkpoint is nobody's wish here.

        Changes: device, `until` (what else has to hold, asked after each step), and parts of the spec that are merged
        with what follows from the rest.

        Raises:
            RunError: it ended before, or took too long.
        """
        device = changes.pop("device", self.device)
        if (name, device) in self.done:
            return self.done[name, device]
        until: Callable[[Run], bool] = changes.pop("until", lambda _: True)
        store = self.folder / f"{name}-{device}"
        spec = {
            "workers": {"image": "none", "device": device, "accelerator": {"count": int(device == "cuda")}},
            "model": model,
            "training": {
                # More than are made: where a run ends, it is ended from outside.
                "steps": 100_000,
                "precision": "fp32",
                "optimizer": {"learningRate": 1e-3},
                "schedule": {"kind": "constant"},
                **changes.pop("training", {}),
            },
            "data": {"sources": [{"uri": f"file://{self._corpus()}"}]},
            "checkpoint": {"store": f"file://{store}", "everySteps": 1_000_000, **changes.pop("checkpoint", {})},
            **changes,
        }
        launch = {
            "runId": f"gpu-check/{name}",
            "attempt": 1,
            **{"globalRank": 0, "localRank": 0, "nodeRank": 0, "worldSize": 1, "localWorldSize": 1},
            "masterAddress": "127.0.0.1",
            "masterPort": _free_port(),
            "spec": spec,
            "errorFile": str(self.folder / f"{name}.json"),
        }
        environment = {"LLMTRAIN_LAUNCH": json.dumps(launch), "LLMTRAIN_WORK_DIR": str(self.folder / "work")}
        run = Run(store)
        self._watch(environment, run, lambda: len(run.steps) >= steps and until(run))
        self.done[name, device] = run
        return run

    def _watch(self, environment: dict[str, str], run: Run, finished: Callable[[], bool]) -> None:
        command = [sys.executable, "-m", "llmtrain_trainer"]
        log = run.store.with_suffix(".log")
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **environment}, cwd=ROOT
            ) as process,
        ):
            limit = threading.Timer(RUN_SECONDS, process.kill)
            limit.start()
            assert process.stdout is not None
            for line in process.stdout:
                record = json.loads(line) if line.startswith("{") else {}
                if "event" in record:
                    run.events.append(record)
                elif "loss" in record:
                    run.steps.append(record)
                if finished():
                    break
            limit.cancel()
            process.kill()
        if not finished():
            raise RunError(f"ended, or was after {RUN_SECONDS} s, with {len(run.steps)} steps; {_last_words(log)}")

    def _corpus(self) -> Path:
        path = self.folder / "corpus" / "numbers.txt"
        if not path.exists():
            path.parent.mkdir(parents=True)
            path.write_text(TEXT)
        return path.parent


def program(*arguments: str) -> dict[str, Any]:
    """Run one of single.py's programs; return what it found.

    Raises:
        RunError: it failed, or took too long.
    """
    command = [sys.executable, "-m", "hack.gpu_check.single", *arguments]
    # On a CPU one thread each, as the trainer's ranks have: more of them would wait for each other on busy cores.
    threads = {"OMP_NUM_THREADS": "1"} if "cpu" in arguments else {}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": RUN_SECONDS, "cwd": ROOT}
    try:
        done = subprocess.run(command, check=False, env={**os.environ, **threads}, **options)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"not done after {RUN_SECONDS} s") from error
    if done.returncode:
        raise RunError((done.stderr.strip().splitlines() or ["no word"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_words(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["no word"])[-1]
