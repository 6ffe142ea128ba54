"""The agent with the real trainer: its ranks train, are killed, and go on from their checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from llmtrain_trainer.agent.settings import DEFAULT_RANK_ENTRY
from tests.integration.agent.harness import AgentProcess, Stage, has_ended, is_running, on_stage, run_order
from tests.support.ports import free_port

STEPS = 30


def spec(folder: Path) -> dict[str, Any]:
    (folder / "data").mkdir()
    (folder / "data/text.txt").write_text("The agent starts the ranks, and the ranks train. " * 400)
    return {
        "workers": {"image": "none", "accelerator": {"count": 0}, "ranksPerWorker": 2, "device": "cpu"},
        "model": {"preset": "tiny"},
        "training": {"steps": STEPS, "globalBatchSize": 2, "precision": "fp32"},
        "data": {"sources": [{"uri": f"file://{folder}/data"}]},
        "checkpoint": {"store": f"file://{folder}/store", "everySteps": 5},
    }


async def warm_agent(stage: Stage) -> AgentProcess:
    """Start an agent; where nobody has started one before, its fork-server first learns what a step needs."""
    agent = stage.agent(LLMTRAIN_RANK_ENTRY=DEFAULT_RANK_ENTRY)
    await stage.coordinator.until(lambda r: r.warm, "the fork-server is warm", seconds=180)
    return agent


@on_stage
async def test_killed_rank_costs_a_restart_in_place_and_the_run_ends_well(stage: Stage) -> None:
    training = spec(stage.folder)
    agent = await warm_agent(stage)
    await stage.coordinator.give(run_order(1, training, master_port=free_port()))
    saved = await stage.coordinator.until(
        lambda r: r.progress and r.progress.checkpoint_step >= 5 and is_running(r, 1), "a checkpoint of attempt 1"
    )
    os.kill(saved.report.ranks[1].pid, signal.SIGKILL)
    killed = await stage.coordinator.until(lambda r: any(rank.signal == 9 for rank in r.ranks), "the exit")
    assert not killed.report.ranks[1].by_agent
    before = len(stage.coordinator.received)
    await stage.coordinator.give(run_order(2, training, master_port=free_port()))
    done = (await stage.coordinator.until(lambda r: has_ended(r, 2), "attempt 2 ends", before)).report
    assert [rank.exit_code for rank in done.ranks] == [0, 0], agent.output.read_text()[-4000:]
    assert done.progress and (done.progress.attempt, done.progress.step) == (2, STEPS)
    assert done.progress.resumed_from >= 5 and done.progress.first_step == done.progress.resumed_from + 1
    assert done.progress.checkpoint_step == STEPS
    assert not agent.event("forkserver_has_threads"), "ranks were forked from a process with threads"


@on_stage
async def test_users_mistake_is_told_by_the_rank(stage: Stage) -> None:
    training = spec(stage.folder)
    training["data"]["sources"][0]["uri"] = f"file://{stage.folder}/nowhere"
    await warm_agent(stage)
    await stage.coordinator.give(run_order(1, training, master_port=free_port()))
    ranks = (await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")).report.ranks
    assert 64 in [rank.exit_code for rank in ranks]
    assert any(rank.error and "nowhere" in rank.error.message for rank in ranks)
