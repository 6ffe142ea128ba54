"""The story of `make demo` on a machine that can hold no cluster: the same job with processes in place of pods."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from llmtrain_kind.demo import (
    NAMESPACE,
    STEPS_BETWEEN_FAULTS,
    FaultReport,
    compare,
    cost_of,
    first_step_after,
    manifest,
)
from llmtrain_kind.driver import DriverError, StepLine, read_steps
from llmtrain_kind.stage import Phases
from llmtrain_operator.local.processes import kill_agents
from llmtrain_operator.local.records import Records

FAULTS = ("rank killed (-9)", "worker killed (-9)", "controller killed (-9)")
HURT_RANK, HURT_WORKER = 3, 1
OUTPUT_SHOWN = 2000

T = TypeVar("T")


def play_local(phases: Phases) -> dict[str, Any]:
    """Run both jobs by `llmtrain run --local`; return the facts that go to build/demo.json.

    Raises:
        DriverError: a job failed, or something that should happen did not.
    """
    with tempfile.TemporaryDirectory(prefix="llmtrain-demo-") as folder:
        return _play(Path(folder), phases)


def _play(folder: Path, phases: Phases) -> dict[str, Any]:
    with phases.phase("an unhurt job, for reference"), LocalJob(folder, "unhurt") as unhurt:
        to_first_step = unhurt.begin()
        reference = unhurt.finish()
    reports = []
    with phases.phase("the same job, hurt three times"), LocalJob(folder, "hurt") as job:
        job.begin()
        for fault in FAULTS:
            report = job.hurt(fault)
            print(f"    {fault}: next step after {report.seconds_to_next_step:.2f} s", flush=True)
            reports.append(report)
        hurt = job.finish()
        status = job.status()
    steps = int(job.manifest["spec"]["training"]["steps"])
    differences = compare(reference, hurt, steps) + compare(reference, reference, steps)
    return {
        "state": status["state"],
        "steps": steps,
        "applyToFirstStepSeconds": to_first_step,
        "faults": [asdict(report) for report in reports],
        "lossesEqualToTheLastBit": not differences,
        "differences": differences[:20],
        "finalLoss": reference[-1].loss.hex(),
        "statusFailures": status.get("failures", []),
        "phases": [{"name": name, "seconds": seconds} for name, seconds in phases.taken],
    }


class LocalJob:
    """One job on this machine; leaving the context ends all that belongs to it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.manifest = manifest(name)
        self._name = name
        self._state = folder / "state"
        self._file = folder / f"{name}.json"
        self._file.write_text(json.dumps(self.manifest))  # JSON is YAML, too
        self._log = folder / f"{name}.log"
        self._records = Records(self._state, NAMESPACE, name)
        self._store = self._records.folder / "volumes" / "checkpoints" / name
        self._controller: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, *error: object) -> None:
        if self._controller and self._controller.poll() is None:
            self._controller.kill()
            self._controller.wait()
        kill_agents(self._records.workers_folder)

    def begin(self) -> float:
        """Start the job and wait for its first optimizer step; return the seconds from the command to that step."""
        started = time.time()
        self._start_controller()
        first = self._wait("the first step", lambda: read_steps(self._store))
        return first[0].time - started

    def finish(self) -> list[StepLine]:
        """Wait until the job succeeded; return its steps."""
        self._wait("the end", lambda: self._controller is not None and self._controller.poll() is not None, 600)
        if self.status().get("state") != "Succeeded":
            raise DriverError(f"{self._name} did not succeed:\n{self._output()}")
        return read_steps(self._store)

    def hurt(self, fault: str) -> FaultReport:
        """Let the job make some steps, deal it one fault and wait for its next step."""
        begin = read_steps(self._store)[-1].step
        self._wait("steps before it", lambda: read_steps(self._store)[-1].step >= begin + STEPS_BETWEEN_FAULTS)
        moment = self._deal(fault)
        before = [line for line in read_steps(self._store) if line.time <= moment][-1]
        newer = None if fault.startswith("controller") else before.attempt
        after = self._wait(f"a step after: {fault}", lambda: first_step_after(read_steps(self._store), moment, newer))
        if newer is not None:  # a step may have ended between the kill and the reading
            before = [line for line in read_steps(self._store) if line.attempt == before.attempt][-1]
        return cost_of(fault, moment, before, after)

    def status(self) -> dict[str, Any]:
        job = self._records.load_job() or {}
        return dict(job.get("status", {}))

    def _deal(self, fault: str) -> float:
        """Kill somebody; return the moment (Unix seconds)."""
        if fault.startswith("controller"):
            assert self._controller
            moment = time.time()
            self._controller.kill()
            self._controller.wait()
            self._start_controller()
            return moment
        find = self._rank_pid if fault.startswith("rank") else self._worker_pid
        pid = self._wait(f"somebody to hurt: {fault}", find)
        moment = time.time()
        os.kill(pid, signal.SIGKILL)
        return moment

    def _start_controller(self) -> None:
        command = [sys.executable, "-m", "llmtrain_operator.cli.main", "run", "--local", str(self._file)]
        with self._log.open("ab") as log:
            self._controller = subprocess.Popen(
                [*command, "--state", str(self._state)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _worker_pid(self) -> int | None:
        newest = {record.index: record.pid for record in self._records.load_workers()}
        return newest.get(HURT_WORKER)

    def _rank_pid(self) -> int | None:
        """Find the rank by the name that its process carries, among those of this very job."""
        marker = f"{self._records.workers_folder.absolute()}/".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                named = (process / "comm").read_text().strip() == f"ltrank-{HURT_RANK}"
                if named and marker in (process / "environ").read_bytes():
                    return int(process.name)
            except OSError:  # it has just ended
                continue
        return None

    def _wait(self, what: str, condition: Callable[[], T | None], timeout: float = 180) -> T:
        """Return the condition's first true value.

        Raises:
            DriverError: there was none in time, or the controller ended before.
        """
        end = time.monotonic() + timeout
        while True:
            ended = self._controller is not None and self._controller.poll() is not None
            value = condition()
            if value:
                return value
            if ended or time.monotonic() > end:
                why = "the run ended" if ended else f"{timeout:.0f} s passed"
                raise DriverError(f"{self._name}: {why} while waiting for {what}\n{self._output()}")
            time.sleep(0.02)

    def _output(self) -> str:
        return self._log.read_text(errors="replace")[-OUTPUT_SHOWN:]
