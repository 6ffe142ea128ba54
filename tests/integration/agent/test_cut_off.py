"""A worker that has lost the coordinator ends its ranks if they are stuck too, and only then."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from tests.integration.agent.harness import AgentProcess, Stage, eventually, has_ended, is_running, on_stage, run_order

FENCE_SECONDS = 1.5
STEPS: dict[str, Any] = {"beats": True, "failurePolicy": {"hang": {"floorSeconds": 1}}}


async def _training(stage: Stage, spec: dict[str, Any]) -> AgentProcess:
    stage.coordinator.hold_seconds = 0.5
    agent = stage.agent(LLMTRAIN_FENCE_SECONDS=str(FENCE_SECONDS))
    await stage.coordinator.give(run_order(1, spec))
    await stage.coordinator.until(lambda r: is_running(r, 1) and r.progress and r.progress.step > 8, "ranks step")
    return agent


@on_stage
async def test_silent_and_stuck_the_ranks_are_killed_and_that_is_reported(stage: Stage) -> None:
    agent = await _training(stage, {**STEPS, "stuckAt": 100})
    await stage.coordinator.stop()
    assert (await eventually(lambda: agent.event("fenced"), "the agent fences"))["seconds"] >= FENCE_SECONDS
    before = len(stage.coordinator.received)
    await stage.coordinator.start()
    told = (await stage.coordinator.until(lambda r: has_ended(r, 1), "it is reported", before)).report
    for rank in told.ranks:
        assert rank.signal == signal.SIGKILL and rank.by_agent and rank.error, rank
        assert "cut off: no word from the coordinator for" in rank.error.message
    await stage.coordinator.give(run_order(2, STEPS))
    await stage.coordinator.until(lambda r: is_running(r, 2), "the next attempt runs", before)


@on_stage
async def test_silent_and_stepping_they_train_on(stage: Stage) -> None:
    agent = await _training(stage, STEPS)
    await stage.coordinator.stop()
    await eventually(lambda: agent.event("coordinator_away"), "the agent notices")
    await asyncio.sleep(3 * FENCE_SECONDS)
    before = len(stage.coordinator.received)
    await stage.coordinator.start()
    told = (await stage.coordinator.until(lambda r: True, "the agent is back", before)).report
    assert is_running(told, 1) and not agent.event("fenced")


@on_stage
async def test_stuck_but_heard_they_are_the_operators_to_judge(stage: Stage) -> None:
    agent = await _training(stage, {**STEPS, "stuckAt": 100})
    await stage.coordinator.until(lambda r: r.beats and all(b.overdue for b in r.beats), "they are overdue")
    await asyncio.sleep(3 * FENCE_SECONDS)
    assert is_running(stage.coordinator.received[-1].report, 1) and not agent.event("fenced")
