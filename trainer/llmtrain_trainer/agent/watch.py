"""Watches the heartbeats of this worker's ranks: says which are overdue, and fetches the stacks when one is."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from llmtrain_api.spec_failure import HangLimits
from llmtrain_api.sync import Order
from llmtrain_api.sync_beat import FINISH, STACK_BYTES, Beat, Own
from llmtrain_trainer import heartbeat
from llmtrain_trainer.agent import linux
from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.launch import FLIGHT_RECORDS
from llmtrain_trainer.heartbeat import Reading

POLL_SECONDS = 0.5
PROBED_REPORT_SECONDS = 2.0
ANSWER_SECONDS = 1.0
"""How long ranks have to write their stacks."""
LOGGED_BYTES = 16 * 1024
"""Of the stacks of one rank; what was written last tells most, the main thread's."""
FIRST_STEP = "first step"
ALWAYS_PASSED = ("config", "rendezvous", "data", "model", FIRST_STEP)
"""Phases of every start. Others (a checkpoint to load, say) have a limit only once one was seen to take time."""


class Watched(Protocol):
    """What is needed of a running rank (gang.Rank)."""

    @property
    def local_rank(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def pid(self) -> int: ...

    @property
    def error_file(self) -> Path: ...


@dataclass(frozen=True)
class Limits:
    """When a beat is overdue, in seconds: factor x what was measured + floor, and no sooner than the regime's own."""

    factor: float = 3.0
    floor: float = 10.0
    ceiling: float = 240.0
    """Of a part of a step: below the 300 s after which the process group gives up. A larger floor counts more."""
    checkpoint_floor: float = 120.0
    """A slow store is no hang."""
    start_floor: float = 60.0
    measured_steps: int = 3
    """So many steps, beside the first, must have been measured before a step has a limit."""

    def of(self, reading: Reading, longest: dict[str, float]) -> float | None:
        """Return the limit for what the rank does; `longest` holds the start phases of earlier attempts.

        None: nothing is known yet. spec.failurePolicy.deadlines.startSeconds bounds the first start.
        """
        if reading.phase in ("checkpoint", FINISH):
            return max(self.factor * reading.checkpoint_p99 + self.floor, self.checkpoint_floor)
        if reading.in_step and reading.measured_steps >= self.measured_steps:
            return max(min(self.factor * reading.step_p99 + self.floor, self.ceiling), self.floor)
        past = longest.get(regime(reading))
        return None if past is None else max(self.factor * past + self.floor, self.start_floor)


def regime(reading: Reading) -> str:
    """Return under which name the duration of a start phase is remembered."""
    return FIRST_STEP if reading.in_step else reading.phase


@dataclass
class _Attempt:
    """What was seen of the running attempt."""

    number: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    """The longest time in which a rank was seen in each start phase."""
    stepping: bool = False
    asked_at: float | None = None
    """When the ranks were asked for their stacks; None while nothing is suspected."""
    offsets: dict[int, int] = field(default_factory=dict)
    """By local rank: where in its file the answer begins."""
    stacks: dict[int, str] | None = None
    """By local rank, once they had time to answer."""
    overdue: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Means:
    """What the watch acts with."""

    signal_rank: Callable[[int, signal.Signals], None]
    log: EventLog
    news: Callable[[], None]
    clock: Callable[[], float] = time.monotonic


class HangWatch:
    """Decides nothing: the operator sees all ranks, and names the one that the others wait for."""

    def __init__(self, means: Means, limits: Limits | None = None) -> None:
        self._means = means
        self._limits = limits or Limits()
        self._longest: dict[str, float] = {}
        self._attempt = _Attempt()
        self._probing = False
        self._told_at = 0.0

    def obey(self, order: Order) -> None:
        """Take the user's limits, and whether a hang is suspected anywhere in the job.

        Raises:
            ValueError: the limits are none.
        """
        self._probing = order.probe
        if order.assignment:
            policy = order.assignment.spec.get("failurePolicy") or {}
            wanted = HangLimits.model_validate(policy.get("hang") or {})
            self._limits = replace(self._limits, factor=float(wanted.factor), floor=float(wanted.floor_seconds))

    def look(self, attempt: int, ranks: Sequence[Watched]) -> None:
        """Read all beats, and ask for stacks where one is overdue or the operator suspects a hang: twice a second."""
        if attempt != self._attempt.number:
            self._attempt = _Attempt(attempt)
        now, seen = self._means.clock(), self._attempt
        readings = {rank.local_rank: found for rank in ranks if (found := _read(rank))}
        self._learn(list(readings.values()), now)
        overdue = frozenset(n for n, reading in readings.items() if self._is_overdue(reading, now))
        changed, seen.overdue = overdue != seen.overdue, overdue
        if overdue or self._probing:
            answered = self._probe([rank for rank in ranks if rank.local_rank in readings], now)
            changed |= answered or (self._probing and now - self._told_at >= PROBED_REPORT_SECONDS)
        elif seen.asked_at is not None:
            seen.asked_at, seen.stacks = None, None
            changed = True
        if changed:
            self._told_at = now
            self._means.news()

    def stuck(self, ranks: Sequence[Watched], seconds: float) -> bool:
        """Tell whether every rank is overdue in what it does, and for no less than this long.

        A rank of which no limit is known yet (in its start, say) is not stuck: others' deadlines bound that.
        """
        now, readings = self._means.clock(), [_read(rank) for rank in ranks]
        return bool(readings) and all(
            reading and self._is_overdue(reading, now) and now - reading.since >= seconds for reading in readings
        )

    def beats(self, attempt: int, ranks: Sequence[Watched]) -> list[Beat]:
        """Return the beats of these running ranks as they are now."""
        now, seen = self._means.clock(), self._attempt
        stacks = seen.stacks if seen.number == attempt else None
        return [
            Beat(
                global_rank=rank.global_rank,
                phase=reading.phase,
                step=reading.step,
                seconds=round(max(now - reading.since, 0.0), 3),
                limit_seconds=self._limits.of(reading, self._longest),
                own=_own(reading),
                process_state=linux.process_state(rank.pid)[:1],
                probed=stacks is not None and rank.local_rank in stacks,
                stack=main_thread((stacks or {}).get(rank.local_rank, "")),
            )
            for rank in ranks
            if (reading := _read(rank))
        ]

    def _is_overdue(self, reading: Reading, now: float) -> bool:
        limit = self._limits.of(reading, self._longest)
        return limit is not None and now - reading.since > limit

    def _learn(self, readings: Sequence[Reading], now: float) -> None:
        """Remember how long each start phase lasts; it counts once the attempt has come through all of them."""
        seen = self._attempt
        if seen.stepping or not readings:
            return
        starting = [r for r in readings if r.phase not in ("checkpoint", FINISH) and not r.measured_steps]
        for reading in starting:
            name = regime(reading)
            seen.phases[name] = max(seen.phases.get(name, 0.0), now - reading.since)
        if all(reading.measured_steps for reading in readings):
            seen.stepping = True
            for name in (*ALWAYS_PASSED, *seen.phases):
                self._longest[name] = max(self._longest.get(name, 0.0), seen.phases.get(name, 0.0))

    def _probe(self, ranks: Sequence[Watched], now: float) -> bool:
        """Ask the ranks for their stacks, once; return whether the answers have just been read."""
        seen = self._attempt
        if seen.asked_at is None:
            seen.asked_at = now
            for rank in ranks:
                seen.offsets[rank.local_rank] = _size(_stacks_file(rank))
                self._means.signal_rank(rank.pid, heartbeat.STACKS_SIGNAL)
            return False
        if seen.stacks is not None or now - seen.asked_at < ANSWER_SECONDS:
            return False
        asked = [rank for rank in ranks if rank.local_rank in seen.offsets]
        seen.stacks = {rank.local_rank: _tail(_stacks_file(rank), seen.offsets[rank.local_rank]) for rank in asked}
        self._log(asked, now)
        return True

    def _log(self, ranks: Sequence[Watched], now: float) -> None:
        for rank in ranks:
            reading = _read(rank)
            self._means.log.warning(
                "hang_suspected",
                rank=rank.global_rank,
                phase=reading.phase if reading else "",
                step=reading.step if reading else 0,
                seconds=round(now - reading.since, 1) if reading else None,
                overdue=rank.local_rank in self._attempt.overdue,
                process_state=linux.process_state(rank.pid),
                stacks=(self._attempt.stacks or {}).get(rank.local_rank, ""),
                flight_records=sorted(str(file) for file in rank.error_file.parent.glob(f"{FLIGHT_RECORDS}*")),
            )


def main_thread(stacks: str) -> str:
    """Return the main thread's part of what faulthandler wrote, without its headline: it comes last."""
    block = stacks.rstrip().rpartition("\n\n")[2]
    lines = [line.strip() for line in block.splitlines() if line.startswith("  File ")]
    return "\n".join(lines).encode(errors="replace")[:STACK_BYTES].decode(errors="ignore")


def _read(rank: Watched) -> Reading | None:
    return heartbeat.read(heartbeat.beat_file(rank.error_file.parent, rank.local_rank))


def _own(reading: Reading) -> Own | None:
    own = reading.own
    if not own.span:
        return None
    return Own(
        stage=reading.stage,
        loading_seconds=own.loading,
        compute_seconds=own.compute,
        device_seconds=own.device,
        step_seconds=own.step,
        span_seconds=own.span,
    )


def _stacks_file(rank: Watched) -> Path:
    return heartbeat.stacks_file(rank.error_file.parent, rank.local_rank)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _tail(file: Path, begin: int) -> str:
    """Return what was written since, but not more than is good for a log line."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(begin, _size(file) - LOGGED_BYTES))
            return stream.read(LOGGED_BYTES).decode(errors="replace")
    except OSError:
        return ""
