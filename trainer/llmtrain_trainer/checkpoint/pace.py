"""How long from one checkpoint to the next, by time: as asked, or chosen by what saves and failures cost.

Only rank 0's clock and measurements count. All ranks meet now and then, at steps that all know, to hear its verdict.
From each meeting to the next are half of the steps that seem to be left, so that the last ones are close to the moment
and a change of speed is noticed, yet a meeting (one small message) is rare against steps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

RANK_HOURS_PER_FAILURE = 50_000.0
"""419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, 2024, section 3.3.4, table 5)."""
MOST_STEPS_APART = 64
"""Between two meetings: what a sudden change of speed can cost at most."""
STEPS_REMEMBERED = 32
SAVES_REMEMBERED = 5


def young_interval(cost_seconds: float, failure_seconds: float) -> float:
    """Return the seconds between checkpoints that lose the least time.

    Young, 1974: sqrt(2 * cost * mean time between failures). Never more than that mean time, as in Daly, 2006.
    """
    return min(math.sqrt(2 * cost_seconds * failure_seconds), failure_seconds)


def failure_seconds(ranks: int, failures: int, lived_seconds: float) -> float:
    """Return the mean time between failures: that of known hardware, or the job's own where that is worse."""
    known = RANK_HOURS_PER_FAILURE * 3600 / ranks
    return min(known, max(lived_seconds, 1.0) / failures) if failures else known


@dataclass(frozen=True)
class Verdict:
    save: bool
    meet_at: int
    """The step after which ranks meet again."""


def verdict(step: int, remaining_seconds: float, step_seconds: float) -> Verdict:
    """Decide after `step`, when a checkpoint is due in so many seconds: the nearest step to that moment makes it."""
    if remaining_seconds <= step_seconds / 2:
        return Verdict(True, step + 1)
    halfway = remaining_seconds / max(step_seconds, 1e-6) / 2
    return Verdict(False, step + max(1, int(min(halfway, MOST_STEPS_APART))))


class Meter:
    """What steps and saves take, in seconds, by this rank's clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_tick: float | None = None
        self._blocked = 0.0
        self._blocked_since_tick = 0.0
        self._quiet: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._disturbed: list[float] = []
        self._costs: deque[float] = deque(maxlen=SAVES_REMEMBERED)
        self.started = clock()
        """When the newest save began; at first, when measuring did."""

    def tick(self, *, saving: bool) -> None:
        """Take note of the end of a step. `saving`: a checkpoint was being written meanwhile."""
        now = self._clock()
        if self._last_tick is not None:
            seconds = now - self._last_tick - self._blocked_since_tick
            (self._disturbed if saving else self._quiet).append(seconds)
        self._last_tick, self._blocked_since_tick = now, 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure what stops training while a save begins."""
        self.started = self._clock()
        yield
        seconds = self._clock() - self.started
        self._blocked += seconds
        self._blocked_since_tick += seconds

    def saved(self, *, good: bool) -> None:
        """Take note of the end of a save. What a failed one cost counts only as long as nothing better is known."""
        slowdown = max(0.0, sum(self._disturbed) - len(self._disturbed) * self.step_seconds)
        if good or not self._costs:
            self._costs.append(self._blocked + slowdown)
        self._blocked, self._disturbed = 0.0, []

    @property
    def step_seconds(self) -> float:
        """What an undisturbed step takes; 0 before one was seen."""
        return statistics.median(self._quiet) if self._quiet else 0.0

    @property
    def cost_seconds(self) -> float | None:
        """What a save costs: where it stops training, and by how much it slows the steps beside it. None: not known."""
        return statistics.fmean(self._costs) if self._costs else None

    @property
    def since_save(self) -> float:
        return self._clock() - self.started


class Pace:
    """Tells alike on every rank after which steps a checkpoint is due. Every rank asks after each step."""

    def __init__(self, meter: Meter, interval_seconds: Callable[[], float]) -> None:
        """`interval_seconds` is asked on rank 0 alone."""
        self._meter = meter
        self._interval_seconds = interval_seconds
        self._meet_at: int | None = None

    def due(self, step: int) -> bool:
        """Tell whether to make a checkpoint after this step. May raise RuntimeError where another rank is gone."""
        if self._meet_at is None:  # the first step of an attempt takes longer than others: the second is measured
            self._meet_at = step + 1
        if step < self._meet_at:
            return False
        agreed = self._from_first(step)
        self._meet_at = agreed.meet_at
        return agreed.save

    def _from_first(self, step: int) -> Verdict:
        """Return rank 0's verdict, by the group that trains: its other messages come in the same order on all ranks."""
        told = torch.zeros(2, dtype=torch.int64)
        if dist.get_rank() == 0:
            remaining = self._interval_seconds() - self._meter.since_save
            own = verdict(step, remaining, self._meter.step_seconds)
            told = torch.tensor([own.save, own.meet_at], dtype=torch.int64)
        dist.broadcast(told, src=0)
        save, meet_at = told.tolist()
        return Verdict(bool(save), meet_at)
