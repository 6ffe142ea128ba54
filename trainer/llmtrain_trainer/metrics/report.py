"""What a step achieved, told to everybody who listens: metrics.jsonl, stdout, a person's terminal, the agent, sinks."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmtrain_api.sync import Progress
from llmtrain_trainer.checkpoint.base import METRICS
from llmtrain_trainer.checkpoint.outcome import Committed, Failed
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.metrics.balance import Balance, shares
from llmtrain_trainer.metrics.lines import LineFile
from llmtrain_trainer.metrics.record import StepRecord
from llmtrain_trainer.metrics.sinks import Sinks
from llmtrain_trainer.metrics.speed import MemoryMeter

BAR_WIDTH = 24


NAMES = {"data_loading": "data", "forward": "fwd", "backward": "bwd", "pipeline": "pipe", "sync_wait": "sync"}
"""Of parts of a step, where there is little room."""


class Reporter:
    """Rank 0's voice; on other ranks every method does nothing."""

    def __init__(self, config: RunConfig, store_root: Path) -> None:
        self._config = config
        self._speaks = config.is_first
        self._file = LineFile(store_root / METRICS) if self._speaks else None
        self._sinks = Sinks(config) if self._speaks else None
        self._balance = Balance()
        self.memory = MemoryMeter(config.device, watch=self._speaks)
        self._terminal = self._speaks and sys.stdout.isatty()
        self._socket = _socket() if self._speaks and config.launch.progress_socket else None
        self._first: tuple[int, float] | None = None
        self._progress: Progress | None = None
        self.resumed_from = -1
        self.skipped: tuple[str, ...] = ()
        self._failed: Failed | None = None
        self._last_loss = 0.0
        self._stall = 0.0

    def event(self, name: str, **facts: Any) -> None:
        """Say once what happened, as one JSON line on stdout."""
        if self._speaks:
            self._print(
                json.dumps({"event": name, "attempt": self._config.launch.attempt, "time": time.time(), **facts})
            )

    def checkpoint_failed(self, failed: Failed) -> None:
        """Tell everybody, the agent with the next step, that a checkpoint was not made."""
        self._failed = failed
        self.event("checkpoint_failed", step=failed.step, reason=failed.reason)

    def step(self, record: StepRecord, committed: Committed | None) -> None:
        """Tell everybody about a finished step."""
        if not self._speaks:
            return
        line = json.dumps(asdict(record))
        if self._file is not None:
            self._file.append(line)
        self._first = self._first or (record.step, record.time)
        self._last_loss = self._last_loss if record.loss is None else record.loss
        self._stall += record.split.get("checkpoint", 0.0)
        if self._terminal:
            self._draw(record)
        else:
            self._print(line)
        self._tell_sinks(record)
        if self._balance.step(record.split):
            self.event("advice", step=record.step, advice=self._balance.advice)
        self._progress = Progress(
            attempt=record.attempt,
            step=record.step,
            first_step=self._first[0],
            first_step_at=self._first[1],
            steps=self._config.spec.training.steps,
            tokens=record.tokens,
            loss=self._last_loss,
            gradient_norm=record.grad_norm or 0.0,
            skipped_steps=record.skipped_steps,
            tokens_per_second=record.tokens_per_second,
            memory_bytes=record.memory_bytes,
            step_at=record.time,
            checkpoint_stall_seconds=self._stall,
            resumed_from=self.resumed_from,
            skipped_checkpoints="; ".join(self.skipped)[:1024],
        )
        self.tell_agent(committed)

    def _tell_sinks(self, record: StepRecord) -> None:
        assert self._sinks is not None
        self._sinks.write(record)
        self._tell_complaints()

    def _tell_complaints(self) -> None:
        complaints = self._sinks.complaints() if self._sinks else {}
        if reason := self.memory.complaint():
            complaints["nvml"] = reason
        for name, reason in complaints.items():
            self.event("sink_failed", sink=name, reason=reason)

    def already_done(self, step: int, loss: float, committed: Committed | None) -> None:
        """Tell the agent about a run that was complete before this attempt made a step."""
        now = time.time()
        self._progress = Progress(
            attempt=self._config.launch.attempt,
            step=step,
            first_step=step,
            first_step_at=now,
            steps=self._config.spec.training.steps,
            tokens=step * self._config.tokens_per_step,
            loss=loss,
            step_at=now,
            resumed_from=self.resumed_from,
            skipped_checkpoints="; ".join(self.skipped)[:1024],
        )
        self.tell_agent(committed)

    def tell_agent(self, committed: Committed | None) -> None:
        """Send the newest progress and checkpoint as one datagram; dropped when nobody listens or the queue is full."""
        if self._socket is None or self._progress is None:
            return
        update: dict[str, Any] = {}
        if committed:
            update = {"checkpoint_step": committed.step, "checkpoint_at": committed.at}
        if self._failed and (committed is None or committed.step < self._failed.step):  # later ones make it good
            update["failed_checkpoint"] = self._failed.reason[:1024]
        message = json.dumps(self._progress.model_copy(update=update).to_wire()).encode()
        with contextlib.suppress(OSError):
            self._socket.sendto(message, self._config.launch.progress_socket)

    def close(self) -> None:
        """Make what was written durable."""
        if self._terminal:
            self._print("")
        if self._sinks is not None:
            self._sinks.close()
            self._tell_complaints()
        if self._file is not None:
            self._file.close()

    def _draw(self, record: StepRecord) -> None:
        steps = self._config.spec.training.steps
        filled = BAR_WIDTH * record.step // steps
        left = (steps - record.step) * record.step_seconds
        norm = math.nan if record.grad_norm is None else record.grad_norm
        sys.stdout.write(
            f"\r[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] step {record.step}/{steps}  loss {self._last_loss:.4f}  "
            f"grad {norm:.3f}  lr {record.learning_rate:.2e}  {record.tokens_per_second:,.0f} tok/s  "
            f"{_mfu(record)}{_split(record)}  {record.step_seconds * 1e3:.0f} ms/step  {left:.0f} s left \x1b[K"
        )
        sys.stdout.flush()

    @staticmethod
    def _print(line: str) -> None:
        print(line, flush=True)


def _mfu(record: StepRecord) -> str:
    return "" if record.mfu is None else f"{record.mfu:.1%} MFU  "


def _split(record: StepRecord) -> str:
    found = shares(record.split)
    return " ".join(f"{short} {found[part]:.0%}" for part, short in NAMES.items() if part in found)


def _socket() -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.setblocking(False)
    return channel
