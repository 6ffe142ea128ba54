"""A rank's own time: what counts, what does not, over which span; and the clock that stands still in sleep."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain_trainer import heartbeat
from llmtrain_trainer.heartbeat import Heartbeat
from llmtrain_trainer.metrics import device_probe
from llmtrain_trainer.metrics.device_probe import PERIOD_SECONDS, DeviceProbe
from llmtrain_trainer.owntime import WINDOW_SECONDS, OwnClock, busy_seconds


class Rank:
    """One rank in a time of its own: `busy` seconds pass on the CPU, the rest in sleep."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self.own = OwnClock(lambda: self.cpu)

    def phase(self, name: str, busy: float = 0.0, waits: float = 0.0) -> None:
        self.now, self.cpu = self.now + busy + waits, self.cpu + busy
        self.own.left(name, busy + waits)

    def step(self, busy: float, waits: float, loading: float = 0.0, saving: float = 0.0) -> None:
        self.own.step_begins(self.now)
        self.phase("data_loading", 0.0, loading)
        self.phase("forward", busy, waits / 2)
        self.phase("sync_wait", 0.0, waits / 2)
        self.phase("checkpoint", saving)


def test_waiting_and_checkpoints_are_not_own_time_but_loading_is() -> None:
    rank = Rank()
    for _ in range(20):
        rank.step(busy=0.5, waits=1.0, loading=0.25, saving=0.25)
    newest = rank.own.newest
    assert newest.compute == pytest.approx(0.5)
    assert newest.loading == pytest.approx(0.25)
    assert newest.step == pytest.approx(2.0)
    assert newest.span == pytest.approx(WINDOW_SECONDS, abs=4.0)


def test_fast_steps_are_put_together_and_one_odd_second_does_not_count() -> None:
    rank = Rank()
    for number in range(4000):
        rank.step(busy=0.5 if 1000 <= number < 1003 else 0.004, waits=0.006)
    assert rank.own.newest.compute == pytest.approx(0.004, rel=0.05)
    assert len(rank.own._window) <= WINDOW_SECONDS + 2, "a rank remembers little, however fast it steps"


def test_a_rank_that_becomes_slow_is_seen_to_be_within_the_window() -> None:
    rank = Rank()
    for _ in range(100):
        rank.step(busy=0.1, waits=0.9)
    began = rank.now
    while rank.own.newest.compute < 0.5:
        rank.step(busy=0.8, waits=0.2)
    assert rank.now - began < WINDOW_SECONDS


def test_nothing_is_told_before_there_is_enough_to_tell() -> None:
    rank = Rank()
    for _ in range(4):
        assert rank.own.newest.span == 0
        rank.step(busy=5.0, waits=5.0)
    assert rank.own.newest.span == pytest.approx(30.0), "three steps of ten seconds, after the one that compiles"


def test_the_busy_clock_stands_still_in_sleep_and_runs_at_work() -> None:
    busy = busy_seconds()
    before, began = busy(), time.monotonic()
    time.sleep(0.5)
    asleep = busy() - before
    while time.monotonic() < began + 1.0:
        pass
    awake = busy() - before - asleep
    assert asleep < 0.25 <= 0.4 < awake <= 0.6


def test_a_rank_that_is_not_let_run_is_busy() -> None:
    """Many threads on one CPU: each gets a part of it, and wants all of it."""
    found: list[float] = []

    def spin() -> None:
        busy, began = busy_seconds(), time.monotonic()
        before = busy()
        while time.monotonic() < began + 0.5:
            sum(range(1000))
        found.append(busy() - before)

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # They share one interpreter lock too, in which they sleep: some of the time is not counted, a third surely is.
    assert sum(found) >= 0.5


def test_a_kernel_that_tells_no_queues_leaves_the_time_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("os.open", refuse)
    assert busy_seconds() is time.thread_time


def test_own_time_and_stage_go_through_the_beat_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    heart = Heartbeat(str(tmp_path / "beat"))
    heart.stage = 3
    for step in range(1, 9):
        heart.enter("data_loading", step)
        now += 0.5
        heart.enter("forward")
        now += 1.5
    reading = heartbeat.read(tmp_path / "beat")
    assert reading and reading.stage == 3
    assert reading.own.loading == pytest.approx(0.5) and reading.own.step == pytest.approx(2.0)
    assert reading.own.span == pytest.approx(12.0), "of eight steps without the first, which compiles, and the last"


class Event:
    """Stands for torch.cuda.Event, which needs a GPU: done as soon as it is asked."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.clock += 2.0
        self.at = Event.clock

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_on_a_gpu_a_product_is_timed_now_and_then_and_the_host_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decisions alone: the events are stand-ins, and the product is made on the CPU. `make gpu-check` has a GPU."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(device_probe, "SIZE", 8)
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, device, **options: full(*args, **options))
    rank = Rank()
    probe = DeviceProbe(torch.device("cuda"), rank.own, lambda: rank.now)
    for _ in range(60):
        rank.step(busy=0.5, waits=0.5)
        probe.step()
    assert rank.own.newest.device == pytest.approx(0.002)
    assert rank.own.newest.compute == 0.0
    assert Event.clock / 4 == pytest.approx(60 / PERIOD_SECONDS, abs=2), "two events of two milliseconds every 5 s"


def test_on_a_cpu_there_is_no_probe() -> None:
    rank = Rank()
    probe = DeviceProbe(torch.device("cpu"), rank.own, lambda: rank.now)
    for _ in range(60):
        probe.step()
        rank.step(busy=0.5, waits=0.5)
    assert rank.own.newest.device == 0.0 and rank.own.newest.compute == pytest.approx(0.5)
