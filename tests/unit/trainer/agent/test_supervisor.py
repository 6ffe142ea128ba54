"""The supervisor against a fork-server, a kernel and a coordinator that do anything at any moment, in virtual time."""

from __future__ import annotations

import asyncio
import heapq
import io
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmtrain_api.sync import Assignment, Order
from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.launch import RankStart
from llmtrain_trainer.agent.oom import OomWatch
from llmtrain_trainer.agent.supervisor import KILL_PATIENCE_SECONDS, Supervisor, Surroundings

RANKS = 2


@dataclass(order=True)
class Timer:
    at: float
    callback: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class VirtualLoop:
    """The three calls of an event loop that the supervisor makes."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[Timer] = []
        self._real = asyncio.new_event_loop()

    def time(self) -> float:
        return self._now

    def call_at(self, at: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(at, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def create_future(self) -> asyncio.Future[int]:
        return self._real.create_future()

    def sleep(self, seconds: float) -> None:
        end = self._now + seconds
        while self._timers and self._timers[0].at <= end:
            timer = heapq.heappop(self._timers)
            self._now = max(self._now, timer.at)
            if not timer.cancelled:
                timer.callback()
        self._now = end

    def close(self) -> None:
        self._real.close()


class PlayedHost:
    """Keeps what was asked of the fork-server, for the test to play its part."""

    def __init__(self) -> None:
        self.warm = False
        self.asked: list[int] = []
        """Attempts, in the order of `start`."""
        self.unanswered: int | None = None
        self.alive: dict[int, int] = {}
        """Process id to attempt."""
        self.signals: dict[int, list[signal.Signals]] = {}

    def start(self, attempt: int, starts: Sequence[RankStart]) -> None:
        assert not self.alive, "ranks were started beside living ones"
        assert attempt not in self.asked, "an attempt was started twice"
        assert self.warm and len(starts) == RANKS
        self.asked.append(attempt)
        self.unanswered = attempt

    def signal(self, pid: int, number: signal.Signals, group: bool) -> None:
        assert group == (number == signal.SIGKILL)
        self.signals.setdefault(pid, []).append(number)


class World:
    """A supervisor in its played surroundings."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.host = PlayedHost()
        self.ready_error: OSError | None = None
        self._next_pid = 100
        around = Surroundings(
            self.host,
            EventLog(io.StringIO()),
            OomWatch(Path("/nowhere")),
            starts,
            self._ready,
            lambda: None,
            lambda: None,
        )
        self.supervisor = Supervisor(around, self.loop)  # type: ignore[arg-type]

    def _ready(self, attempt: int) -> None:
        if self.ready_error:
            raise self.ready_error

    def warm(self) -> None:
        self.host.warm = True
        self.supervisor.warmed()

    def answer_start(self) -> None:
        attempt = self.host.unanswered
        assert attempt is not None
        self.host.unanswered = None
        pids = [self._next_pid + index for index in range(RANKS)]
        self._next_pid += RANKS
        self.host.alive |= dict.fromkeys(pids, attempt)
        self.supervisor.started(attempt, pids)

    def exit(self, pid: int, status: int) -> None:
        del self.host.alive[pid]
        self.supervisor.exited(pid, status, self.loop.time())

    def lose(self) -> None:
        for pid in list(self.host.alive):
            self.exit(pid, signal.SIGKILL)
        cold = 0 if self.host.warm else 1
        self.host.warm, self.host.unanswered = False, None
        self.supervisor.lost("killed", cold)

    def run(self, attempt: int) -> None:
        """Bring an attempt to run from nothing."""
        self.warm()
        self.supervisor.obey(run_order(attempt))
        self.answer_start()


def _nothing() -> None:
    """Nobody is told."""


def starts(assignment: Assignment) -> list[RankStart]:
    return [RankStart(rank, rank, {}, Path("/nowhere/error")) for rank in range(assignment.ranks_per_worker)]


def run_order(attempt: int) -> Order:
    assignment = Assignment(
        attempt=attempt,
        node_rank=0,
        num_nodes=1,
        ranks_per_worker=RANKS,
        master_address="a",
        master_port=1,
        run_id="t/j",
        spec={},
    )
    return Order(kind="run", attempt=attempt, assignment=assignment)


class AnythingGoes(RuleBasedStateMachine):
    """Whatever the order of events: never two attempts at once, never an attempt twice, never backwards."""

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.highest = 0

    @rule(attempt=st.integers(1, 8), run=st.booleans(), grace=st.sampled_from([0.0, 1.0, 30.0]))
    def order(self, attempt: int, run: bool, grace: float) -> None:
        order = run_order(attempt) if run else Order(kind="wait", attempt=attempt, grace_seconds=grace)
        assert self.world.supervisor.obey(order) == (attempt >= self.highest)
        self.highest = max(self.highest, attempt)

    @precondition(lambda self: not self.world.host.warm)
    @rule()
    def become_warm(self) -> None:
        self.world.warm()

    @rule()
    def lose_forkserver(self) -> None:
        self.world.lose()

    @precondition(lambda self: self.world.host.unanswered is not None)
    @rule(works=st.booleans())
    def answer(self, works: bool) -> None:
        if works:
            self.world.answer_start()
        else:
            attempt, self.world.host.unanswered = self.world.host.unanswered, None
            self.world.supervisor.refused(attempt, "no process ids")

    @precondition(lambda self: self.world.host.alive)
    @rule(data=st.data(), status=st.sampled_from([0, 1 << 8, 64 << 8, 9, 11]))
    def rank_ends(self, data: st.DataObject, status: int) -> None:
        self.world.exit(data.draw(st.sampled_from(sorted(self.world.host.alive))), status)

    @rule(seconds=st.sampled_from([0.1, 1.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.loop.sleep(seconds)

    @invariant()
    def attempts_only_rise(self) -> None:
        if hasattr(self, "world"):
            assert self.world.host.asked == sorted(self.world.host.asked)

    @invariant()
    def older_ranks_are_being_ended(self) -> None:
        if hasattr(self, "world"):
            for pid, attempt in self.world.host.alive.items():
                assert (pid in self.world.host.signals) == (attempt < self.highest)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if not world.host.warm:
            world.warm()
        if world.host.unanswered is not None:
            world.answer_start()
        world.supervisor.obey(run_order(9))
        for pid in list(world.host.alive):
            assert signal.SIGKILL in world.host.signals[pid]
            world.exit(pid, signal.SIGKILL)
        world.answer_start()
        assert world.host.asked[-1] == 9 and world.supervisor.attempt == 9
        assert [rank.state for rank in world.supervisor.ranks()] == ["running"] * RANKS
        world.loop.close()


TestAnythingGoes = AnythingGoes.TestCase
TestAnythingGoes.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


def test_repeated_order_can_only_shorten_the_grace(world: World) -> None:
    world.run(1)
    world.supervisor.obey(Order(kind="wait", attempt=2, grace_seconds=10))
    world.loop.sleep(6)
    world.supervisor.obey(Order(kind="wait", attempt=2, grace_seconds=10))
    world.loop.sleep(3.9)
    assert all(numbers == [signal.SIGTERM] for numbers in world.host.signals.values())
    world.loop.sleep(0.2)
    assert list(world.host.signals.values()) == [[signal.SIGTERM, signal.SIGKILL]] * RANKS


def test_order_to_run_cuts_the_grace_short(world: World) -> None:
    world.run(1)
    world.supervisor.obey(Order(kind="wait", attempt=2, grace_seconds=3600))
    world.supervisor.obey(run_order(2))
    assert list(world.host.signals.values()) == [[signal.SIGTERM, signal.SIGKILL]] * RANKS


def test_rank_that_failed_before_any_signal_is_not_ours(world: World) -> None:
    world.run(1)
    first, second = world.host.alive
    world.exit(first, 1 << 8)
    world.supervisor.obey(Order(kind="wait", attempt=2))
    world.exit(second, signal.SIGKILL)
    assert [rank.by_agent for rank in world.supervisor.ranks()] == [False, True]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        pytest.param([0, 0], 0, id="all succeeded"),
        pytest.param([0, 143 << 8], 143, id="one was preempted"),
        pytest.param([9, 9], 143, id="killed"),
    ],
)
def test_exit_code_after_sigterm(world: World, statuses: list[int], code: int) -> None:
    world.run(1)
    world.supervisor.stop(10)
    for pid, status in zip(list(world.host.alive), statuses, strict=True):
        assert not world.supervisor.finished.done()
        world.exit(pid, status)
    assert world.supervisor.finished.result() == code


def test_stopping_agent_starts_nothing(world: World) -> None:
    world.warm()
    world.supervisor.stop(10)
    world.supervisor.obey(run_order(1))
    assert not world.host.asked and world.supervisor.finished.result() == 143


def test_stopping_while_ranks_start_kills_them(world: World) -> None:
    world.warm()
    world.supervisor.obey(run_order(1))
    world.supervisor.stop(3600)
    assert not world.supervisor.finished.done()
    world.answer_start()
    assert list(world.host.signals.values()) == [[signal.SIGKILL]] * RANKS


@pytest.mark.parametrize("answered", [pytest.param(True, id="ranks"), pytest.param(False, id="fork-server")])
def test_what_sigkill_does_not_end_is_not_waited_for_for_ever(world: World, answered: bool) -> None:
    world.warm()
    world.supervisor.obey(run_order(1))
    if answered:
        world.answer_start()
        world.supervisor.stop(1)
        world.loop.sleep(1)
    else:
        world.supervisor.stop(1)
    assert not world.supervisor.finished.done()
    world.loop.sleep(KILL_PATIENCE_SECONDS + 0.1)
    assert world.supervisor.finished.result() == 143


def test_worker_whose_folder_cannot_be_prepared_reports_failed_ranks(world: World) -> None:
    world.ready_error = OSError(28, "No space left on device")
    world.warm()
    world.supervisor.obey(run_order(1))
    ranks = world.supervisor.ranks()
    assert [rank.exit_code for rank in ranks] == [1, 1] and not world.host.asked
    assert ranks[0].error and "No space left" in ranks[0].error.message


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(Order(kind="run", attempt=1), id="no assignment"),
        pytest.param(run_order(2).model_copy(update={"attempt": 1}), id="assignment of another attempt"),
    ],
)
def test_order_that_contradicts_itself_is_refused_and_changes_nothing(world: World, order: Order) -> None:
    world.warm()
    with pytest.raises(ValueError, match="attempt 1"):
        world.supervisor.obey(order)
    assert not world.host.asked
    assert world.supervisor.obey(run_order(1)) and world.host.asked == [1]
