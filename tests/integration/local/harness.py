"""Real `llmtrain run --local` processes: start them, hurt them and what they started, and compare the losses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llmtrain_api.constants import Env

PROGRAM = str(Path(sys.executable).parent / "llmtrain")
PATIENCE = 240.0
"""Seconds until a condition that does not come true fails the test: generous, for a loaded machine."""
STEPS = 40
EVERY_STEPS = 5
ONE = {"workers_replicas": 1}
"""For tests in which it does not matter how many workers there are: one starts in half the time of two."""


def eventually(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value


@dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl."""

    attempt: int
    step: int
    loss: float


def read_steps(store: Path) -> list[Step]:
    """Return the whole lines so far."""
    try:
        text = (store / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]
    return [Step(row["attempt"], row["step"], row["loss"]) for row in rows]


def bits(steps: Sequence[Step]) -> dict[int, set[str]]:
    """Return every loss that was ever seen for each step, to the last bit."""
    found: dict[int, set[str]] = {}
    for step in steps:
        found.setdefault(step.step, set()).add(step.loss.hex())
    return found


def manifest(name: str, **changes: Any) -> dict[str, Any]:
    """Return a job of two workers with two ranks each. Changes: dotted paths below spec, with _ for the dot."""
    spec: dict[str, Any] = {
        "workers": {
            "replicas": 2,
            "ranksPerWorker": 2,
            "device": "cpu",
            "accelerator": {"count": 0},
            "image": "localhost/llmtrain-trainer:dev",
        },
        "model": {"preset": "tiny"},
        "training": {"steps": STEPS, "globalBatchSize": 8, "precision": "fp32"},
        "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
        "checkpoint": {"store": f"pvc://checkpoints/{name}", "everySteps": EVERY_STEPS},
    }
    for path, value in changes.items():
        *parents, last = path.split("_")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return {"apiVersion": "llmtrain.dev/v1alpha1", "kind": "LLMTrainJob", "metadata": {"name": name}, "spec": spec}


@dataclass
class Run:
    """A job on this machine. `prefix` goes before the command (to change the user)."""

    folder: Path
    manifest: dict[str, Any]
    prefix: Sequence[str] = ()
    controller: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.starts = 0
        self.file = self.folder / "job.yaml"
        self.file.write_text(json.dumps(self.manifest))  # JSON is YAML
        self.state = self.folder / "state"
        self.records = self.state / f"default.{self.manifest['metadata']['name']}"
        self.store = self.records / "volumes" / self.manifest["spec"]["checkpoint"]["store"].removeprefix("pvc://")

    # --- the command

    def start(self, *options: str, output: int | None = None) -> subprocess.Popen[bytes]:
        """Start the command; what it says goes to a file of its own, or to `output`."""
        command = [*self.prefix, PROGRAM, "run", "--local", str(self.file), "--state", str(self.state), *options]
        self.starts += 1
        with self._output_file().open("wb") as file:
            self.controller = subprocess.Popen(
                command, stdout=output or file, stderr=file, cwd=self.folder, preexec_fn=_hear_interrupts
            )
        return self.controller

    def _output_file(self) -> Path:
        return self.folder / f"output-{self.manifest['metadata']['name']}-{self.starts}"

    def said(self) -> str:
        """Return what the last start of the command has said so far."""
        return self._output_file().read_text()

    def finish(self) -> tuple[int, str]:
        """Wait for the command's end; return its exit code and all that it said."""
        assert self.controller
        self.controller.wait(PATIENCE)
        return self.controller.returncode, self.said()

    def succeed(self) -> str:
        code, output = self.finish()
        assert code == 0, output
        return output

    def kill_controller(self) -> None:
        assert self.controller
        self.controller.kill()
        self.controller.wait(PATIENCE)

    def clean_up(self) -> None:
        """End all that a failed test left."""
        if self.controller and self.controller.poll() is None:
            self.controller.kill()
        for process in self.processes():
            process.kill()

    # --- what it wrote

    def job(self) -> dict[str, Any]:
        job: dict[str, Any] = json.loads((self.records / "job.json").read_text())
        return job

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.job()["status"]
        return status

    def steps(self) -> list[Step]:
        return read_steps(self.store)

    def wait_for_step(self, step: int, attempt: int = 1) -> Step:
        """Wait until a step as late as this was made in an attempt as late as that."""

        def reached() -> Step | None:
            assert self.controller and (self.controller.poll() is None or reached_now()), self.said()
            return reached_now()

        def reached_now() -> Step | None:
            return next((s for s in reversed(self.steps()) if s.step >= step and s.attempt >= attempt), None)

        found: Step = eventually(reached, f"step {step} of attempt {attempt}")
        return found

    # --- its processes

    def processes(self) -> list[psutil.Process]:
        """Return the agents, fork-servers and ranks of this run: all that carry its folder in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(Env.WORK_DIR, "").startswith(f"{self.state}/"):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def agents(self) -> dict[int, psutil.Process]:
        """Return the living agents by worker index."""
        living = [p for p in self.processes() if "llmtrain_trainer.agent.main" in " ".join(p.cmdline())]
        return {int(p.environ()[Env.WORKER_INDEX]): p for p in living}

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the living ranks by global rank."""
        return {
            int(p.name().removeprefix("ltrank-")): p
            for p in self.processes()
            if p.name().startswith("ltrank-") and p.status() != psutil.STATUS_ZOMBIE
        }

    def assert_nothing_runs(self) -> None:
        eventually(lambda: not self.processes(), "every agent and rank has gone")

    def kill_rank(self, rank: int) -> None:
        process = eventually(lambda: self.ranks().get(rank), f"rank {rank} runs")
        process.send_signal(signal.SIGKILL)


def _hear_interrupts() -> None:
    """What a shell started in the background ignores SIGINT (nohup: SIGHUP), and so would all that it starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
