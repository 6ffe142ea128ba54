"""Steps are told soon when they matter, and seldom otherwise."""

from __future__ import annotations

from llmtrain_trainer.agent.agent import PROGRESS_PERIOD_SECONDS
from tests.integration.agent.harness import Stage, has_ended, is_running, on_stage, run_order

TOLERANCE = 0.5
"""Seconds by which a report may come early: the two ends measure at different moments."""


@on_stage
async def test_first_step_and_checkpoints_are_told_at_once_and_the_rest_every_five_seconds(stage: Stage) -> None:
    await stage.running({"stepSeconds": 0.01, "checkpointEvery": 100_000})
    first = (await stage.coordinator.until(lambda r: r.progress, "the first step")).report.progress
    assert first and first.step_at - first.first_step_at < PROGRESS_PERIOD_SECONDS - TOLERANCE
    known = len(stage.coordinator.received)
    await stage.coordinator.until(lambda r: r.progress and r.progress.step > first.step, "the next report", known)
    early, late = stage.coordinator.received[known - 1 : known + 1]
    assert late.at - early.at >= PROGRESS_PERIOD_SECONDS - TOLERANCE
    await stage.coordinator.give(run_order(2, {"stepSeconds": 0.01, "checkpointEvery": 50}))
    seen = []
    for checkpoint in (50, 100, 150):
        found = await stage.coordinator.until(
            lambda r, c=checkpoint: r.progress and r.progress.checkpoint_step == c, f"checkpoint {checkpoint}"
        )
        seen.append(found.at)
    assert seen == sorted(seen) and seen[-1] - seen[0] < 2 * PROGRESS_PERIOD_SECONDS


@on_stage
async def test_last_step_is_in_the_report_of_the_exit_and_gone_with_the_next_attempt(stage: Stage) -> None:
    stage.agent()
    await stage.coordinator.give(run_order(1, {"steps": 20, "stepSeconds": 0}))
    ended = (await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")).report
    assert ended.progress and ended.progress.step == 20
    before = len(stage.coordinator.received)
    await stage.coordinator.give(run_order(2, {"stepSeconds": 600}))
    report = (await stage.coordinator.until(lambda r: is_running(r, 2), "attempt 2 runs", before)).report
    assert report.progress is None
