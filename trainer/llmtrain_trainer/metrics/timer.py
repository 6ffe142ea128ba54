"""Where a step's time goes: data_loading, forward, backward, sync_wait, optimizer, report, checkpoint.

Under pipeline parallel, forward and backward of different micro-batches take turns, and a stage waits in between for
others: these two are one part then, `pipeline`.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from llmtrain_trainer.heartbeat import Heartbeat

PARTS = ("data_loading", "forward", "backward", "sync_wait", "optimizer", "report", "checkpoint")
PIPELINE_PARTS = ("data_loading", "pipeline", "sync_wait", "optimizer", "report", "checkpoint")
AGREED = "sync_wait"
"""The part that ends when this rank knows what all have agreed on: all its work up to there has been done."""

FOLLOWS = {
    "data_loading": "forward",
    "forward": "backward",
    "backward": "data_loading",
    "pipeline": "sync_wait",
    "sync_wait": "optimizer",
    "optimizer": "report",
    "report": "checkpoint",
}
"""What begins where a part ends, unless `enter` says otherwise: for the heartbeat, which tells what is going on."""


class StepTimer:
    """Splits time between named parts, by marks at their ends.

    On a GPU the marks are events on the stream, because the host runs ahead of it. A step is told when ranks have
    agreed on it, so its time runs from one agreement to the next: what comes after (its optimizer, say) may be under
    way still, is not waited for, and counts for the step after it.
    """

    def __init__(self, device: torch.device, heart: Heartbeat | None = None) -> None:
        self._heart = heart or Heartbeat()
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begin, before the first step."""
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        """Say that what happened since the last mark was `part`."""
        self._marks.append((part, self._now()))
        if part in FOLLOWS:
            self._heart.enter(FOLLOWS[part])

    def enter(self, part: str, step: int | None = None) -> None:
        """Say that `part` begins now, of this step where it is the first part of one."""
        self._heart.enter(part, step)

    def finish(self) -> tuple[float, dict[str, float]]:
        """Return the seconds from the last agreement (at first: the start) to the newest, and their split."""
        end = max(n for n, (part, _) in enumerate(self._marks) if part == AGREED)
        marks, self._marks = self._marks[: end + 1], self._marks[end:]
        if self._on_gpu:
            marks[-1][1].synchronize()  # all before it is done, so this takes no time; reading it otherwise may fail
        named = PIPELINE_PARTS if any(part == "pipeline" for part, _ in marks) else PARTS
        split = dict.fromkeys(named, 0.0)
        for (_, before), (part, after) in pairwise(marks):
            split[part] += self._between(before, after)
        return self._between(marks[0][1], marks[-1][1]), split

    def _between(self, before: Any, after: Any) -> float:
        return before.elapsed_time(after) / 1e3 if self._on_gpu else after - before

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
