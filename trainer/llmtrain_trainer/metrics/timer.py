"""Where a step's time goes: data_loading, forward, backward, sync_wait, optimizer.

Under pipeline parallel, forward and backward of different micro-batches take turns, and a stage waits in between for
others: these three are one part then, `pipeline`.
"""

from __future__ import annotations

import time
from typing import Any

import torch

PARTS = ("data_loading", "forward", "backward", "sync_wait", "optimizer")
PIPELINE_PARTS = ("data_loading", "pipeline", "sync_wait", "optimizer")


class StepTimer:
    """Splits the time of one step between named parts, by marks at their ends.

    On a GPU the marks are events on the stream, because the host runs ahead of it. `finish` waits for the last of them:
    that is the optimizer's kernels, all that is still under way after the step's own reduction was read.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        """Say that what happened since the last mark was `part`."""
        self._marks.append((part, self._now()))

    def finish(self) -> tuple[float, dict[str, float]]:
        """Return the step's seconds and its split in seconds; waits for the work up to the last mark."""
        if self._on_gpu:
            self._marks[-1][1].synchronize()  # the time of an event that has not happened cannot be read
        total = time.perf_counter() - self._started
        named = PIPELINE_PARTS if any(part == "pipeline" for part, _ in self._marks) else PARTS
        split = dict.fromkeys(named, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            split[part] += before.elapsed_time(after) / 1e3 if self._on_gpu else after - before
        return total, split

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
