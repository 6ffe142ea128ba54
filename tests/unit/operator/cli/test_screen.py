"""One screen about a job, as a terminal shows it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from llmtrain_api.constants import State
from llmtrain_api.job import LLMTrainJob
from llmtrain_operator.cli.screen import duration, render, sparkline
from tests.support.jobs import make_job

AT = "2026-11-30T10:20:30Z"
PROGRESS = {
    "step": 40,
    "steps": 100,
    "tokens": "20480",
    "loss": "2.5",
    "tokensPerSecond": "1000",
    "etaSeconds": 125,
    "updatedAt": AT,
}


def drawn(job: LLMTrainJob, losses: Sequence[float] = (), width: int = 120) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(render(job, losses))
    return console.export_text()


def job(**status: Any) -> LLMTrainJob:
    made = make_job().with_workers(2, 2).build()
    return LLMTrainJob.parse({**made.to_wire(), "status": status})


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "\u2581"),
        ([2.0, 2.0, 2.0], "\u2581\u2581\u2581"),
        ([8.0, 1.0], "\u2588\u2581"),
        ([1.0, 2, 3, 4, 5, 6, 7, 8], "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"),
        ([1.0, math.nan, 8.0], "\u2581 \u2588"),
        ([math.inf, 1.0, -math.inf, 8.0], " \u2581 \u2588"),
        ([math.nan, math.inf], ""),
        ([-1e308, 1e308], "\u2581\u2588"),
        ([5e-324, 0.0], "\u2588\u2581"),
    ],
    ids=["none", "one", "flat", "falling", "rising", "nan", "inf", "nothing finite", "widest span", "smallest span"],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (42.9, "42s"),
        (59, "59s"),
        (60, "1m00s"),
        (425, "7m05s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (11_520, "3h12m"),
        (86_399, "23h59m"),
        (86_400, "1d0h"),
        (187_200, "2d4h"),
        (-3, "0s"),
    ],
    ids=str,
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_job_that_nobody_has_looked_at() -> None:
    screen = drawn(make_job("demo", "lab").build())
    assert "lab/demo  Pending  workers 0/0  attempt 0" in screen
    assert "no checkpoint yet" in screen
    assert "loss" not in screen


def test_a_job_at_work() -> None:
    screen = drawn(
        job(
            state="Training",
            attempt=2,
            workers={"desired": 2, "ready": 2, "summary": "2/2"},
            progress=PROGRESS,
            checkpoint={"lastGoodStep": 30},
            shape={"worldSize": 4, "replicate": 2, "shard": 2, "zeroStage": 3},
            restarts={"total": 3, "byClass": {"Crash": 2, "Disruption": 1}},
        ),
        [3.0, 2.75, 2.5],
    )
    for part in (
        "Training  workers 2/2  attempt 2",
        "40%  step 40/100  2m05s left",
        "loss 2.5  1000 tokens/s  \u2588\u2585\u2581",
        "checkpoint step 30 | 4 ranks = 2 x 2 (ZeRO 3) | restarts 3 (2 Crash, 1 Disruption)",
    ):
        assert part in screen


@pytest.mark.parametrize("state", ["Succeeded", "Failed"])
def test_no_time_is_left_to_a_job_that_has_ended(state: str) -> None:
    screen = drawn(job(state=state, progress={**PROGRESS, "etaSeconds": 0}))
    assert "step 40/100" in screen
    assert "left" not in screen


def test_failures_tell_who_what_and_what_it_cost() -> None:
    failure = {
        "at": AT,
        "attempt": 1,
        "class": "Crash",
        "worker": 1,
        "pod": "demo-w1-a1",
        "rank": 3,
        "message": "rank 3 on worker 1 was killed by signal 9 (SIGKILL)",
        "action": "RestartRanks",
        "lostSteps": 7,
        "secondsToNextStep": "0.81",
    }
    screen = drawn(job(state="Training", attempt=2, failures=[failure]), width=160)
    for part in ("10:20:30", "Crash", "demo-w1-a1 rank 3", "RestartRanks", " 7 ", "0.81 s", "was killed by signal 9"):
        assert part in screen


def test_only_the_newest_failures_fit() -> None:
    failures = [
        {"at": AT, "attempt": n, "class": "Crash", "message": f"number {n}.", "action": "RestartRanks"}
        for n in range(1, 17)
    ]
    screen = drawn(job(state="Training", attempt=17, failures=failures))
    assert "number 16." in screen
    assert "number 10." not in screen
    assert "10 earlier" in screen


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
def test_every_state_is_shown_with_its_message(state: State) -> None:
    screen = drawn(job(state=state.value, message="Why [bold]and[/bold] what to do"))
    assert state.value in screen
    assert "Why [bold]and[/bold] what to do" in screen, "a message is text, not markup"


def test_a_checkpoint_that_was_not_saved() -> None:
    screen = drawn(job(checkpoint={"lastGoodStep": 10, "failed": "step 20 could not be saved: full"}))
    assert "not saved: step 20 could not be saved: full" in screen


def test_a_checkpoint_that_was_not_trusted() -> None:
    screen = drawn(job(checkpoint={"lastGoodStep": 10, "skipped": "step-00000020: wrong checksum"}))
    assert "not trusted: step-00000020: wrong checksum" in screen


@pytest.mark.parametrize("width", [20, 40, 200])
def test_any_width_will_do(width: int) -> None:
    assert "demo" in drawn(job(state="Training", progress=PROGRESS), [1.0] * 60, width)
