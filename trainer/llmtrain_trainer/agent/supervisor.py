"""Makes the worker what the newest order says it should be, whatever happens in between."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmtrain_api.constants import ExitCode
from llmtrain_api.sync import Assignment, Order, RankReport
from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.gang import Gang, Rank
from llmtrain_trainer.agent.launch import RankStart
from llmtrain_trainer.agent.oom import OomWatch

COLD_DEATHS_ALLOWED = 2
"""How often the fork-server may die while importing before an attempt that waits for it is reported as failed."""
KILL_PATIENCE_SECONDS = 5.0
"""A leaving agent waits this long for killed ranks; one that hangs in the kernel ends with the container."""


class Host(Protocol):
    """What the supervisor needs of the fork-server's host."""

    @property
    def warm(self) -> bool: ...

    def start(self, attempt: int, starts: Sequence[RankStart]) -> None: ...

    def signal(self, pid: int, number: signal.Signals, group: bool) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """What the supervisor works with."""

    host: Host
    log: EventLog
    oom: OomWatch
    plan_ranks: Callable[[Assignment], list[RankStart]]
    make_ready: Callable[[int], None]
    """Prepare the worker for this attempt; may raise OSError."""
    sweep: Callable[[], None]
    """End what ranks that are gone have left behind."""
    news: Callable[[], None]
    """The coordinator should hear of something."""


@dataclass(frozen=True)
class _Leaving:
    """The agent is to end with `exit_code`, or with 0 where success counts and all ranks succeeded."""

    exit_code: int
    since: float
    success_counts: bool = False


class Supervisor:
    """Level-triggered: every event ends in `_converge`, which compares what is with what should be.

    All methods are called from the event loop. `finished` holds the agent's exit code once no rank is left.
    """

    def __init__(self, surroundings: Surroundings, loop: asyncio.AbstractEventLoop) -> None:
        self._around = surroundings
        self._loop = loop
        self._order = Order(kind="wait")
        self._gang = Gang()
        self._starting: tuple[int, list[RankStart]] | None = None
        self._last_started = 0
        self._leaving: _Leaving | None = None
        self._told_to_stop = False
        self._timer: asyncio.TimerHandle | None = None
        self.finished: asyncio.Future[int] = loop.create_future()

    # What the coordinator is told

    @property
    def attempt(self) -> int:
        return self._gang.attempt

    @property
    def stopping(self) -> bool:
        return self._leaving is not None

    @property
    def idle(self) -> bool:
        return not self._gang.running and self._starting is None

    @property
    def running(self) -> list[Rank]:
        return self._gang.running

    def ranks(self) -> list[RankReport]:
        return [rank.report() for rank in self._gang.ranks]

    # What the coordinator and the kernel want

    def obey(self, order: Order) -> bool:
        """Take a new order; return False where it is of an older attempt than what is in force.

        Raises:
            ValueError: the order contradicts itself.
        """
        if order.kind == "exit":
            self._leave(_Leaving(order.exit_code, self._loop.time()), order.grace_seconds)
            self._converge()
            return True
        if order.attempt < max(self._order.attempt, self._last_started):
            return False
        if order.kind == "run" and (order.assignment is None or order.assignment.attempt != order.attempt):
            raise ValueError(f"the order to run attempt {order.attempt} carries no assignment of that attempt")
        self._order = order
        self._converge()
        return True

    def stop(self, grace_seconds: float) -> None:
        """Leave as after SIGTERM: ranks get SIGTERM, and SIGKILL after the grace. A second call hurries."""
        leaving = _Leaving(128 + signal.SIGTERM, self._loop.time(), success_counts=True)
        self._leave(leaving, 0.0 if self._told_to_stop else grace_seconds)
        self._told_to_stop = True
        self._around.news()
        self._converge()

    def abandon(self, exit_code: int) -> None:
        """Leave at once, without grace for the ranks."""
        self._leave(_Leaving(exit_code, self._loop.time()), 0.0)
        self._converge()

    def fence(self, why: str) -> bool:
        """Kill the ranks, since the job may have gone on elsewhere, and wait for orders; False where it was done."""
        alive = [rank for rank in self._gang.running if rank.kill_at is None]
        for rank in alive:
            rank.why = why
            self._end(rank, 0.0)
        self._converge()
        return bool(alive)

    def _leave(self, leaving: _Leaving, grace_seconds: float) -> None:
        self._leaving = self._leaving or leaving
        for rank in self._gang.running:
            self._end(rank, grace_seconds)

    # What the fork-server tells (HostListener)

    def warmed(self) -> None:
        self._around.news()
        self._converge()

    def started(self, attempt: int, pids: Sequence[int]) -> None:
        assert self._starting and self._starting[0] == attempt
        self._publish(Gang.started(attempt, self._starting[1], pids))
        self._around.log.info("ranks_started", pids=list(pids))
        if self._leaving:
            self._leave(self._leaving, 0.0)  # they have hardly begun: there is nothing to save
        self._converge()

    def refused(self, attempt: int, error: str) -> None:
        assert self._starting and self._starting[0] == attempt
        self._publish(Gang.stillborn(attempt, self._starting[1], error))
        self._converge()

    def exited(self, pid: int, status: int, at: float) -> None:
        rank = self._gang.by_pid(pid)
        if rank is None:
            return
        rank.ended(status, at)
        rank.oom_killed = rank.signal == signal.SIGKILL and not rank.killed and self._around.oom.take()
        self._around.news()
        self._around.log.info(
            "rank_exited",
            rank=rank.global_rank,
            pid=pid,
            exit_code=rank.exit_code,
            signal=rank.signal,
            by_agent=rank.by_agent,
            oom_killed=rank.oom_killed,
            error=rank.error.message if rank.error else None,
        )
        if self.idle:
            self._around.sweep()
        self._converge()

    def lost(self, why: str, cold_deaths: int) -> None:
        if self._starting:
            self._publish(Gang.stillborn(*self._starting, why=f"{why} while it started the ranks"))
        elif cold_deaths > COLD_DEATHS_ALLOWED and (assignment := self._due()):
            self._last_started = assignment.attempt
            why = f"{why} while importing the trainer, {cold_deaths} times in a row: see the worker's log"
            self._publish(Gang.stillborn(assignment.attempt, self._around.plan_ranks(assignment), why))
        self._around.news()
        self._converge()

    # How the two are brought together

    def _converge(self) -> None:
        if self.finished.done():
            return
        order = self._order
        if self._gang.attempt < order.attempt:
            for rank in self._gang.running:
                self._end(rank, order.grace_seconds if order.kind == "wait" else 0.0)
        self._kill_overdue()
        if self._leaving:
            if self.idle or self._gave_up():
                won = self._leaving.success_counts and self._gang.succeeded
                self.finished.set_result(ExitCode.SUCCESS if won else self._leaving.exit_code)
        elif self._around.host.warm and (assignment := self._due()):
            self._start(assignment)

    def _due(self) -> Assignment | None:
        """Return what should be started and can be: once per attempt, after all older ranks have been reaped."""
        order = self._order
        due = order.kind == "run" and order.attempt > self._last_started and self.idle
        return order.assignment if due else None

    def _start(self, assignment: Assignment) -> None:
        attempt, starts = assignment.attempt, self._around.plan_ranks(assignment)
        self._last_started = attempt
        self._around.log.info(
            "ranks_starting",
            starting=attempt,
            ranks=len(starts),
            node_rank=assignment.node_rank,
            world_size=assignment.world_size,
            master=f"{assignment.master_address}:{assignment.master_port}",
        )
        try:
            self._around.make_ready(attempt)
        except OSError as error:
            self._publish(Gang.stillborn(attempt, starts, f"the worker's folder cannot be prepared: {error}"))
            return
        self._around.oom.start_afresh()
        self._starting = (attempt, starts)
        self._around.host.start(attempt, starts)

    def _publish(self, gang: Gang) -> None:
        """Make this the gang that the coordinator hears of."""
        self._gang, self._starting = gang, None
        self._around.log.bind(attempt=gang.attempt)
        if not gang.running and gang.ranks[0].error:
            self._around.log.error("ranks_not_started", why=gang.ranks[0].error.message)
        self._around.news()

    def _end(self, rank: Rank, grace_seconds: float) -> None:
        """Have a rank ended: SIGTERM now, SIGKILL after the grace. Repeated, it can only become sooner."""
        kill_at = self._loop.time() + grace_seconds
        if rank.kill_at is None and grace_seconds > 0:
            # To the rank alone: what it started is needed for the last checkpoint.
            self._around.host.signal(rank.pid, signal.SIGTERM, group=False)
        rank.kill_at = kill_at if rank.kill_at is None else min(rank.kill_at, kill_at)

    def _kill_overdue(self) -> None:
        """Kill the ranks whose time is over, and come back when the next one's is, or our patience ends."""
        now = self._loop.time()
        pending: list[float] = []
        if self._leaving and self._starting:
            pending.append(self._leaving.since + KILL_PATIENCE_SECONDS)
        for rank in self._gang.running:
            if rank.kill_at is None:
                continue
            if not rank.killed and rank.kill_at <= now:
                rank.killed = True
                self._around.host.signal(rank.pid, signal.SIGKILL, group=True)
            pending.append(rank.kill_at if not rank.killed else now + KILL_PATIENCE_SECONDS)
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(pending), self._converge) if pending else None

    def _gave_up(self) -> bool:
        """A leaving agent does not wait for ever for ranks that SIGKILL does not end."""
        assert self._leaving
        patience = self._loop.time() - KILL_PATIENCE_SECONDS
        if self._starting:
            return self._leaving.since <= patience
        return all(rank.killed and rank.kill_at is not None and rank.kill_at <= patience for rank in self._gang.running)
