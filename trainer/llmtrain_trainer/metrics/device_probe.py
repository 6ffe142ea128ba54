"""Times one small product of matrices on the GPU now and then: how fast this device is, whatever the others do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from llmtrain_trainer.owntime import OwnClock

PERIOD_SECONDS = 5.0
SIZE = 2048
REPEATED = 32
"""17 GFLOP each: 1 to 3 ms on the GPUs of today, once in 5 s."""


class DeviceProbe:
    """Nothing at all on a CPU, whose rank's own time the kernel tells.

    The host waits for nothing: a product is timed by two events on the stream, which are read at a later step.
    """

    def __init__(self, device: torch.device, own: OwnClock, clock: Callable[[], float] = time.monotonic) -> None:
        self._own, self._clock = own, clock
        self._events: tuple[Any, Any] | None = None
        self._due = clock() + PERIOD_SECONDS
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            own.use_device()
            self._factor = torch.full((SIZE, SIZE), 1.0 / SIZE, dtype=torch.bfloat16, device=device)
            self._product = torch.empty_like(self._factor)

    def step(self) -> None:
        """Begin a product where one is due, and take the last one's time; called at the beginning of each step."""
        if not self._on_gpu:
            return
        if self._events and self._events[1].query():
            begin, end = self._events
            self._own.device(begin.elapsed_time(end) / 1e3)
            self._events = None
        if self._events is None and self._clock() >= self._due:
            self._due = self._clock() + PERIOD_SECONDS
            self._events = self._begin()

    def _begin(self) -> tuple[Any, Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATED):
            torch.mm(self._factor, self._factor, out=self._product)
        end.record()
        return begin, end
