"""Those beside metrics.jsonl who are told about each step: none of them can delay or end training.

Each has a thread of its own, which alone imports, opens and calls its package. Records wait for it in a queue; one that
is too slow loses records. What goes wrong is told once, with the reason, by the training thread.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.metrics.record import StepRecord

QUEUE_STEPS = 1024
RETRY_SECONDS = 60.0
"""After which a sink that failed is opened anew: disks are emptied, and servers come back."""
CLOSE_SECONDS = 15.0
"""For all sinks together, at the end of a run."""
MODULES = {"tensorboard": "to_tensorboard", "wandb": "to_wandb", "prometheus": "to_prometheus"}
"""Field of spec.metrics to the module here whose `open_sink(config, first)` makes its sink."""


class Sink(Protocol):
    """Told about steps, in one thread; what it raises is its end."""

    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


Opener = Callable[[StepRecord], Sink]
"""Called with the first record that the sink will be given."""


class SinkThread:
    """Keeps one sink away from training."""

    def __init__(self, name: str, opener: Opener, retry_seconds: float = RETRY_SECONDS) -> None:
        self.name = name
        self._opener = opener
        self._retry_seconds = retry_seconds
        self._queue: queue.Queue[StepRecord | None] = queue.Queue(QUEUE_STEPS)
        self._untold: str | None = None
        self._complained: set[str] = set()
        self._usable = True
        # Daemon: a sink that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def write(self, record: StepRecord) -> None:
        """Hand a record over; returns at once."""
        if not self._usable:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._complain("too slow", f"is {QUEUE_STEPS} steps behind: some are lost to it")

    def complaint(self) -> str | None:
        """Return what went wrong, where it has not been returned before."""
        told, self._untold = self._untold, None
        return told

    def close(self, deadline: float) -> None:
        """Write what is waiting, until time.monotonic() is `deadline`; then leave the rest."""
        try:
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        sink: Sink | None = None
        retry_at = 0.0
        while (record := self._queue.get()) is not None:
            if sink is None and time.monotonic() < retry_at:
                continue
            try:
                sink = sink or self._opener(record)
                sink.write(record)
            except ImportError as error:  # no package appears while a rank runs
                self._usable = False
                self._complain("failed", f"{error}; install the package in the trainer's image")
                return
            except Exception as error:
                self._complain("failed", f"{type(error).__name__}: {error}")
                _close(sink)
                sink, retry_at = None, time.monotonic() + self._retry_seconds
        _close(sink)

    def _complain(self, kind: str, reason: str) -> None:
        if kind not in self._complained:
            self._complained.add(kind)
            self._untold = f"{self._untold}; {reason}" if self._untold else reason


class Sinks:
    """All that the job asks for."""

    def __init__(self, config: RunConfig) -> None:
        wanted = [name for name in MODULES if getattr(config.spec.metrics, name) is not None]
        self._threads = [SinkThread(name, _opener(name, config)) for name in wanted]

    def write(self, record: StepRecord) -> None:
        for thread in self._threads:
            thread.write(record)

    def complaints(self) -> dict[str, str]:
        """Return what went wrong since the last call, by name of the sink."""
        found = {thread.name: thread.complaint() for thread in self._threads}
        return {name: reason for name, reason in found.items() if reason}

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.close(deadline)


def _opener(name: str, config: RunConfig) -> Opener:
    def opener(first: StepRecord) -> Sink:
        module = importlib.import_module(f"llmtrain_trainer.metrics.{MODULES[name]}")
        sink: Sink = module.open_sink(config, first)
        return sink

    return opener


def _close(sink: Sink | None) -> None:
    """Close a sink that may be broken: what it says at its end has been told already, or concerns nobody."""
    try:
        if sink is not None:
            sink.close()
    except Exception:
        return
