"""How long a rank's own work takes per step, without the time in which it waits for others.

In a gang all ranks take equally long for a step, whoever is slow: the others wait. So time is counted only where the
rank itself is busy. On a CPU that is the time in which its main thread runs, or wants to run and is not let: waiting in
a collective it sleeps. On a GPU the host runs ahead and then spins, and kernels of collectives spin on the device: a
small product of matrices is timed there now and then instead. Loading data waits for no rank: it counts by the clock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low

WINDOW_SECONDS = 30.0
"""What is told is the median of this newest span, however many steps that is."""
SLICE_SECONDS = 1.0
"""A window consists of slices at least this long, and of one step at least."""
FEWEST_SLICES = 3
NANOSECONDS = 1e-9
LOADING = "data_loading"
NOT_BUSY = ("", LOADING, "checkpoint")
"""Phases that are not computing: loading counts by the clock, and how long a store takes says nothing of a rank."""


@dataclass(frozen=True)
class OwnTime:
    """Medians over the window, in seconds per step."""

    loading: float = 0.0
    compute: float = 0.0
    """0 where the device is not a CPU."""
    device: float = 0.0
    """Of one timed product of matrices on the GPU; 0 on a CPU."""
    step: float = 0.0
    """From one step to the next, waiting included, checkpoints too."""
    span: float = 0.0
    """How much time the window holds; 0 where it holds too few slices."""


def busy_seconds() -> Callable[[], float]:
    """Return a clock of the calling thread that stands still while it sleeps: time on a CPU and time queued for one.

    A container that used up its quota of CPU is queued, so that a throttled rank is seen to be slow. Where the kernel
    does not tell queues (no CONFIG_SCHED_INFO), the clock is that of the CPU time alone.
    """
    try:
        file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        os.pread(file, 64, 0).split()[1]
    except (OSError, IndexError):
        return time.thread_time

    def read() -> float:
        running, queued, _ = os.pread(file, 64, 0).split()
        return (int(running) + int(queued)) * NANOSECONDS

    return read


@dataclass
class _Slice:
    began: float
    steps: int = 0
    loading: float = 0.0
    busy: float = 0.0
    devices: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Past:
    began: float
    loading: float
    busy: float
    step: float
    device: float | None


class OwnClock:
    """Counts the phases of one rank, called at each change of phase from its main thread."""

    def __init__(self, busy: Callable[[], float] | None = None) -> None:
        self._busy = busy or busy_seconds()
        self._busy_before = self._busy()
        self._counts_busy = True
        self._current: _Slice | None = None
        self._window: deque[_Past] = deque()
        self.newest = OwnTime()

    def use_device(self) -> None:
        """From now on only the times told by `device` say how fast this rank computes."""
        self._counts_busy = False

    def device(self, seconds: float) -> None:
        """Take the duration of one timed product of matrices."""
        if self._current:
            self._current.devices.append(seconds)

    def left(self, phase: str, seconds: float) -> None:
        """Take the phase that ends now, which lasted so long by the clock."""
        current = self._current
        if current and phase == LOADING:
            current.loading += seconds
        if not self._counts_busy:  # the clock is a call into the kernel, at every change of phase
            return
        busy = self._busy()
        if current and phase not in NOT_BUSY:
            current.busy += busy - self._busy_before
        self._busy_before = busy

    def step_begins(self, now: float) -> None:
        """Close the step before. The first one is not counted: it begins the first slice."""
        current = self._current
        if current is None:
            self._current = _Slice(now)
            return
        current.steps += 1
        if now - current.began < SLICE_SECONDS:
            return
        device = median_low(current.devices) if current.devices else None
        loading, busy, step = (v / current.steps for v in (current.loading, current.busy, now - current.began))
        self._window.append(_Past(current.began, loading, busy, step, device))
        while len(self._window) > FEWEST_SLICES and self._window[0].began < now - WINDOW_SECONDS:
            self._window.popleft()
        self._current = _Slice(now)
        self.newest = self._summary(now)

    def _summary(self, now: float) -> OwnTime:
        window = self._window
        devices = [past.device for past in window if past.device is not None]
        return OwnTime(
            loading=median_low(past.loading for past in window),
            compute=median_low(past.busy for past in window),
            device=median_low(devices) if devices else 0.0,
            step=median_low(past.step for past in window),
            span=now - window[0].began if len(window) >= FEWEST_SLICES else 0.0,
        )
