"""Gangs of real ranks for tests: start them, hurt them, and read what they left."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 180.0
POLL_SECONDS = 0.02


class RankHost:
    """The client of rankhost.py."""

    def __init__(self) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.rankhost"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **threads},
        )
        self.warm = self._read()

    def start(self, ranks: list[dict[str, Any]]) -> list[int]:
        pids: list[int] = self._ask({"start": ranks})["pids"]
        return pids

    def poll(self, pids: list[int]) -> dict[int, int]:
        return {int(pid): code for pid, code in self._ask({"poll": pids})["ended"].items()}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_SECONDS)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the rank host is gone (exit code {self._process.wait(WAIT_SECONDS)})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with nested `changes`."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _shorter_warmup(spec: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `spec` with a warm-up that leaves a step of a short job, as a rule of the resource wants."""
    steps = merged(spec, changes)["training"]["steps"]
    warmup = spec["training"].get("schedule", {}).get("warmupSteps", 0)
    return merged(spec, {"training": {"schedule": {"warmupSteps": min(warmup, steps - 1)}}})


@dataclass
class Job:
    """A training run in a folder of its own; each launch is the next attempt."""

    host: RankHost
    folder: Path
    spec: dict[str, Any]
    run_id: str = "tests/job"
    attempt: int = 0
    work_dir: Path | None = None
    """Where tokens are cached; shared between jobs that read the same data."""

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def launch(self, world_size: int, **options: Any) -> Gang:
        """Start the next attempt.

        Options: changes (of the spec), environment, max_file_bytes, nodes, fields (of RankLaunch), per_rank (a function
        from the rank to fields of its RankLaunch).
        """
        self.attempt += 1
        nodes = options.get("nodes", 1)
        per_node = world_size // nodes
        sizes = {"workers": {"replicas": nodes, "ranksPerWorker": per_node}}
        spec = merged({"checkpoint": {"store": f"file://{self.store}"}, **sizes}, self.spec)
        spec = merged(_shorter_warmup(spec, options.get("changes", {})), options.get("changes", {}))
        port = free_port()
        ranks = []
        for rank in range(world_size):
            launch = {
                "runId": self.run_id,
                "jobUid": f"uid-of-{self.run_id}",
                "attempt": self.attempt,
                "globalRank": rank,
                "localRank": rank % per_node,
                "nodeRank": rank // per_node,
                "worldSize": world_size,
                "localWorldSize": per_node,
                "masterAddress": "127.0.0.1",
                "masterPort": port,
                "spec": spec,
                "errorFile": str(self.folder / f"error-{self.attempt}-{rank}.json"),
                **options.get("fields", {}),
            }
            work_dir = self.work_dir or self.folder / "work"
            if options.get("nodes", 1) > 1:
                work_dir = work_dir / f"node-{rank // per_node}"
            environment = {"LLMTRAIN_WORK_DIR": str(work_dir), **options.get("environment", {})}
            if per_rank := options.get("per_rank"):
                launch = merged(launch, per_rank(rank))
            ranks.append(
                {
                    "launch": launch,
                    "log": str(self.folder / f"log-{self.attempt}-{rank}.txt"),
                    "environment": environment,
                    "max_file_bytes": options.get("max_file_bytes"),
                }
            )
        return Gang(self, self.attempt, self.host.start(ranks))

    def run(self, world_size: int, **options: Any) -> Gang:
        """Launch and wait for the end."""
        gang = self.launch(world_size, **options)
        gang.wait()
        return gang

    def metrics(self) -> list[dict[str, Any]]:
        """Return every line of metrics.jsonl."""
        return [json.loads(line) for line in (self.store / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        """Return the loss of steps 1, 2, ...: of a repeated step, the last."""
        by_step = {line["step"]: line["loss"] for line in self.metrics()}
        assert sorted(by_step) == list(range(1, len(by_step) + 1)), f"steps are missing: {sorted(by_step)}"
        return [by_step[step] for step in sorted(by_step)]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.store.iterdir() if path.name.startswith("step-"))


@dataclass
class Gang:
    """The ranks of one attempt."""

    job: Job
    attempt: int
    pids: list[int]
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code, or minus the signal, by rank."""

    def wait(self, seconds: float = WAIT_SECONDS) -> list[int]:
        """Return the exit codes in rank order."""
        self.until(lambda: len(self.codes) == len(self.pids), "all ranks end", seconds)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait for a condition, keeping note of ranks that end; when it takes too long, kill the ranks and fail."""
        deadline = time.monotonic() + seconds
        while True:
            self._note_ended()
            if condition():
                return
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"waited {seconds} s for: {what}\n{self.output()}")
            time.sleep(POLL_SECONDS)

    def until_step(self, step: int) -> None:
        """Wait until a step of this attempt is on record."""
        self.until(lambda: self.last_step() >= step or self._all_ended(), f"step {step}")
        assert self.last_step() >= step, f"ended before step {step}\n{self.output()}"

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to some ranks, or to all that still run."""
        for rank in ranks or range(len(self.pids)):
            if rank not in self.codes:
                os.kill(self.pids[rank], number)  # not reaped yet, so the number is still ours

    def limit_files(self, max_bytes: int | None, *ranks: int) -> None:
        """Have every larger file refused to some ranks, or to all, from now on; None lifts the limit."""
        for rank in ranks or range(len(self.pids)):
            if rank not in self.codes:
                hard = resource.prlimit(self.pids[rank], resource.RLIMIT_FSIZE)[1]
                soft = hard if max_bytes is None else max_bytes
                resource.prlimit(self.pids[rank], resource.RLIMIT_FSIZE, (soft, hard))

    def last_step(self) -> int:
        return max((line["step"] for line in self.lines() if "step" in line and "loss" in line), default=0)

    def lines(self) -> list[dict[str, Any]]:
        """Return the JSON lines that rank 0 has printed."""
        found = []
        for line in self.output(0).splitlines():
            if line.startswith("{") and line.endswith("}"):
                found.append(json.loads(line))
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("event") == name]

    def error(self, rank: int = 0) -> dict[str, Any]:
        """Return the error that a rank has written."""
        record: dict[str, Any] = json.loads((self.job.folder / f"error-{self.attempt}-{rank}.json").read_text())
        return record

    def output(self, *ranks: int) -> str:
        texts = []
        for rank in ranks or range(len(self.pids)):
            path = self.job.folder / f"log-{self.attempt}-{rank}.txt"
            texts.append(path.read_text(errors="replace") if path.exists() else "")
        return "\n".join(texts)

    def _note_ended(self) -> None:
        left = [pid for rank, pid in enumerate(self.pids) if rank not in self.codes]
        for pid, code in self.job.host.poll(left).items() if left else ():
            self.codes[self.pids.index(pid)] = code

    def _all_ended(self) -> bool:
        return len(self.codes) == len(self.pids)
