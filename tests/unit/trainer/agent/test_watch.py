"""HangWatch over real beat files and a real process that answers, or does not, when asked for its stacks."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain_api.sync import Assignment, Order
from llmtrain_api.sync_beat import STACK_BYTES, Beat
from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.watch import FIRST_STEP, HangWatch, Limits, Means, main_thread
from llmtrain_trainer.heartbeat import Heartbeat, Reading, beat_file, stacks_file

RANK = """
import os, sys, time
from llmtrain_trainer.heartbeat import Heartbeat, dump_stacks_at_signal
dump_stacks_at_signal(sys.argv[2])
heart = Heartbeat(sys.argv[1])
for step in range(1, 7):
    heart.enter("data_loading", step)
    heart.enter("forward")
    time.sleep(0.01)
def stuck_in_forward():
    print("up", flush=True)
    open(sys.argv[3]).read()
stuck_in_forward()
"""
LONG = 1000.0
"""Seconds by which the watch's clock is set ahead of the rank's beat: more than any limit here."""


@dataclass(frozen=True)
class Rank:
    error_file: Path
    pid: int
    local_rank: int = 0
    global_rank: int = 5


class Scene:
    """One rank, and its watch with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / "fifo")
        files = [str(beat_file(folder, 0)), str(stacks_file(folder, 0)), str(folder / "fifo")]
        self.process = subprocess.Popen([sys.executable, "-c", RANK, *files], stdout=subprocess.PIPE)
        assert self.process.stdout and self.process.stdout.readline()
        self.rank = Rank(folder / "rank-0.error.json", self.process.pid)
        self.late, self.told, self.log = 0.0, 0, io.StringIO()
        self.asked: list[signal.Signals] = []
        means = Means(self.ask, EventLog(self.log), self.tell, lambda: time.monotonic() + self.late)
        self.watch = HangWatch(means)

    def ask(self, pid: int, number: signal.Signals) -> None:
        self.asked.append(number)
        os.kill(pid, number)

    def tell(self) -> None:
        self.told += 1

    def beat(self) -> Beat:
        """Look, and return what would be reported."""
        self.watch.look(1, [self.rank])
        [beat] = self.watch.beats(1, [self.rank])
        return beat

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()


def test_rank_within_its_limit_is_left_alone(scene: Scene) -> None:
    beat = scene.beat()
    assert (beat.global_rank, beat.phase, beat.step, beat.overdue, beat.probed) == (5, "forward", 6, False, False)
    assert not scene.told and not scene.asked


def test_overdue_rank_is_news_and_shows_where_it_is_stuck(scene: Scene) -> None:
    scene.late = LONG
    assert scene.beat().overdue and scene.told == 1
    scene.until(lambda: "stuck_in_forward" in stacks_file(scene.rank.error_file.parent, 0).read_text())
    scene.beat()
    assert scene.asked == [signal.SIGUSR2], "asked once"
    scene.late += 1.0
    beat = scene.beat()
    assert beat.probed and "in stuck_in_forward" in beat.stack.splitlines()[0] and scene.told == 2
    [line] = scene.logged()
    assert (line["event"], line["rank"], line["overdue"]) == ("hang_suspected", 5, True)
    assert "stuck_in_forward" in line["stacks"]


def test_stopped_rank_does_not_answer_and_its_state_says_so(scene: Scene) -> None:
    os.kill(scene.rank.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, scene.rank.pid, os.WSTOPPED)
    scene.late = LONG
    scene.beat()
    scene.late += 1.0
    beat = scene.beat()
    assert beat.stopped and beat.probed and not beat.stack


def test_operator_asks_and_lets_go(scene: Scene) -> None:
    scene.watch.obey(Order(kind="wait", attempt=1, probe=True))
    scene.beat()
    scene.late = 1.0
    assert scene.beat().probed and not scene.beat().overdue
    told = scene.told
    scene.late += 2.0
    scene.beat()
    assert scene.told == told + 1, "while it is asked, it reports again and again"
    scene.watch.obey(Order(kind="wait", attempt=1))
    assert not scene.beat().probed
    assert len(scene.asked) == 1


def test_users_limits_are_taken_from_the_order(scene: Scene) -> None:
    spec = {"failurePolicy": {"hang": {"factor": 1, "floorSeconds": 5000}}}
    places = {"node_rank": 0, "num_nodes": 1, "ranks_per_worker": 1, "master_address": "x", "master_port": 1}
    assignment = Assignment(attempt=1, run_id="a/b", spec=spec, **places)
    scene.watch.obey(Order(kind="run", attempt=1, assignment=assignment))
    scene.late = LONG
    assert not scene.beat().overdue


def test_start_has_a_limit_only_after_an_attempt_that_came_through(tmp_path: Path) -> None:
    late, rank = 0.0, Rank(tmp_path / "rank-0.error.json", os.getpid())
    means = Means(lambda *_: None, EventLog(io.StringIO()), lambda: None, lambda: time.monotonic() + late)
    watch = HangWatch(means)
    heart = Heartbeat(str(beat_file(tmp_path, 0)))

    def limit_in(attempt: int, phase: str, seconds: float, step: int | None = None) -> float | None:
        nonlocal late
        heart.enter(phase, step)
        late = seconds
        watch.look(attempt, [rank])
        [beat] = watch.beats(attempt, [rank])
        return beat.limit_seconds

    assert limit_in(1, "model", 50.0) is None
    assert limit_in(1, "data_loading", 0.0, 1) is None
    for step in range(2, 6):
        known = limit_in(1, "data_loading", 0.0, step)
    assert known == pytest.approx(10.0, abs=5.0), "a step's own limit, once some were measured"
    heart = Heartbeat(str(beat_file(tmp_path, 0)))
    assert limit_in(2, "model", 1.0) == pytest.approx(160.0, abs=1.0)
    assert limit_in(2, "rendezvous", 1.0) == 60.0
    assert limit_in(2, "checkpoint_load", 1.0) is None, "never seen before: nothing says how long it takes"


durations = st.floats(0, 1000)


@given(phase=st.sampled_from(["checkpoint", "finish"]), p99=durations, measured=st.integers(0, 300))
def test_checkpoint_is_never_overdue_before_three_times_its_own_p99(phase: str, p99: float, measured: int) -> None:
    limit = Limits().of(Reading(phase, 1, 0.0, 0.001, p99, measured), {})
    assert limit is not None and limit >= max(3 * p99, 120.0)


@given(p99=durations, floor=st.floats(1, 10_000))
def test_step_limit_is_below_the_process_groups_unless_the_user_wants_more(p99: float, floor: float) -> None:
    limit = Limits(floor=floor).of(Reading("forward", 9, 0.0, p99, 0.0, 3), {FIRST_STEP: 1.0})
    assert limit is not None and floor <= limit <= max(240.0, floor)


def test_main_thread_is_the_last_that_faulthandler_writes() -> None:
    stacks = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in x\n\nCurrent thread 0x2 (most recent call'
    stacks += ' first):\n  File "b.py", line 2 in y\n  File "c.py", line 3 in z\n'
    assert main_thread(stacks) == 'File "b.py", line 2 in y\nFile "c.py", line 3 in z'
    assert main_thread("") == ""
    assert len(main_thread(stacks + '  File "d.py", line 4 in f\n' * 500).encode()) <= STACK_BYTES
