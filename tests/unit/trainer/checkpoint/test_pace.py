from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain_trainer.checkpoint.pace import (
    MOST_STEPS_APART,
    Meter,
    Verdict,
    failure_seconds,
    verdict,
    young_interval,
)

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("cost", "between_failures", "interval"),
    [(2.0, HOUR, 120.0), (0.0, HOUR, 0.0), (HOUR, 60.0, 60.0)],
    ids=["a save of 2 s and a failure an hour", "nothing to lose", "failures come quicker than saves"],
)
def test_the_interval_of_young(cost: float, between_failures: float, interval: float) -> None:
    assert young_interval(cost, between_failures) == pytest.approx(interval)


@given(cost=st.floats(0.01, 100), between=st.floats(1e4, 1e8), factor=st.floats(0.2, 5))
def test_no_other_interval_loses_less(cost: float, between: float, factor: float) -> None:
    def lost(interval: float) -> float:
        """Time for saves, and half an interval at each failure, per second of training: what Young minimises."""
        return cost / interval + interval / (2 * between)

    best = young_interval(cost, between)
    assert lost(best) <= lost(best * factor) * (1 + 1e-9)


def test_the_rate_of_known_hardware_until_the_jobs_own_is_worse() -> None:
    assert failure_seconds(1000, 0, HOUR) == 50 * HOUR
    assert failure_seconds(1000, 1, 1000 * HOUR) == 50 * HOUR
    assert failure_seconds(1000, 4, 20 * HOUR) == 5 * HOUR
    assert failure_seconds(8, 3, -5.0) > 0, "clocks of two nodes may differ"


@given(interval=st.floats(0.5, 1e5), speed=st.floats(1e-3, 1e3))
def test_at_a_steady_speed_the_nearest_step_saves(interval: float, speed: float) -> None:
    step, meetings = 1, 0
    decided = Verdict(False, 1)
    while not decided.save:
        step = decided.meet_at
        decided = verdict(step, interval - (step - 1) * speed, speed)
        meetings += 1
        assert step < decided.meet_at <= step + MOST_STEPS_APART
        if step > 10_000:
            return
    assert abs((step - 1) * speed - interval) <= speed / 2 * 1.001 or step == 1
    assert meetings <= 20 + interval / speed / MOST_STEPS_APART


def test_a_wait_without_an_end_and_steps_without_a_measure() -> None:
    assert verdict(7, math.inf, 0.5) == Verdict(False, 7 + MOST_STEPS_APART)
    assert verdict(7, 5.0, 0.0) == Verdict(False, 7 + MOST_STEPS_APART)
    assert verdict(7, -1.0, 0.0) == Verdict(True, 8)


def test_a_save_costs_what_it_stops_and_what_it_slows() -> None:
    clock = Clock()
    meter = Meter(clock)

    def steps(count: int, seconds: float, *, saving: bool) -> None:
        for _ in range(count):
            clock.now += seconds
            meter.tick(saving=saving)

    steps(5, 1.0, saving=False)
    assert meter.step_seconds == 1.0
    assert meter.cost_seconds is None
    with meter.saving():
        clock.now += 0.5
    steps(4, 1.25, saving=True)
    meter.saved(good=True)
    assert meter.cost_seconds == pytest.approx(0.5 + 4 * 0.25)
    assert meter.since_save == pytest.approx(0.5 + 4 * 1.25)
    steps(3, 1.0, saving=False)
    assert meter.step_seconds == 1.0, "disturbed steps do not count"
    meter.saved(good=False)
    assert meter.cost_seconds == pytest.approx(1.5), "a failed save says nothing about a good one"
    with meter.saving():
        clock.now += 0.5
    steps(1, 0.75, saving=True)
    meter.saved(good=True)
    assert meter.cost_seconds == pytest.approx((1.5 + 0.5) / 2), "quicker steps are no gain of the save"


def test_a_first_save_that_fails_still_spaces_the_next() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.tick(saving=False)
    with meter.saving():
        clock.now += 0.1
    meter.saved(good=False)
    assert meter.cost_seconds == pytest.approx(0.1)
