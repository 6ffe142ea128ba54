"""The side of the benchmark: starts a contender's ranks, gives them turns, and ends them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.turns import PIPES, TASK, Task
from benchmarks.peers.venvs import python_of
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 180.0


class ContenderError(Exception):
    """A contender ended, or said nothing for too long; with the end of what its ranks printed."""


@dataclass(frozen=True)
class Program:
    """How a contender is started."""

    name: str
    module: str
    venv: str = ""
    arguments: tuple[str, ...] = ()


class Contender:
    """Ranks that wait for their turn."""

    def __init__(self, program: Program, task: Task) -> None:
        self.name = program.name
        self.losses: list[float] = []
        self._logs = [Path(task.folder) / f"{program.name}-{rank}.log" for rank in range(task.ranks)]
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._orders: list[Any] = []
        self._answers: list[Any] = []
        port = free_port()
        for rank in range(task.ranks):
            self._start(program, task, rank, port)

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in (*self._orders, *self._answers):
            pipe.close()
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def turn(self, steps: int) -> float:
        """Have every rank make some steps; return the seconds until the last has made them.

        Raises:
            ContenderError: it could not.
        """
        for orders in self._orders:
            try:
                orders.write(f"{steps}\n")
                orders.flush()
            except BrokenPipeError:
                raise ContenderError(self._last_words()) from None
        answers = [self._answer(rank) for rank in range(len(self._ranks))]
        shares: Sequence[tuple[float, ...]] = list(zip(*(answer["losses"] for answer in answers), strict=True))
        self.losses += [sum(step) for step in shares]
        return float(max(answer["seconds"] for answer in answers))

    def _answer(self, rank: int) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        ready, _, _ = select.select([self._answers[rank]], [], [], deadline - time.monotonic())
        line = self._answers[rank].readline() if ready else ""
        if not line:
            raise ContenderError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self, program: Program, task: Task, rank: int, port: int) -> None:
        read_orders, write_orders = os.pipe()
        read_answers, write_answers = os.pipe()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": task.ranks, "LOCAL_WORLD_SIZE": task.ranks}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        environment = {
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            **threads,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(ROOT),
            TASK: task.text(),
            PIPES: f"{read_orders},{write_answers}",
        }
        python = python_of(program.venv)
        environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"  # DeepSpeed calls ninja
        with self._logs[rank].open("wb") as log:
            process = subprocess.Popen(
                [python, "-m", program.module, *program.arguments],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(read_orders, write_answers),
            )
        os.close(read_orders)
        os.close(write_answers)
        self._ranks.append(process)
        self._orders.append(os.fdopen(write_orders, "w"))
        self._answers.append(os.fdopen(read_answers))

    def _last_words(self) -> str:
        ends = (f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in self._logs)
        return f"{self.name} gave no answer\n" + "\n".join(ends)
