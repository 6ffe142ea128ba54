"""Ranks are started once, watched, and ended as ordered."""

from __future__ import annotations

import json
import os
import signal

from tests.integration.agent.harness import Stage, eventually, is_running, on_stage, run_order


@on_stage
async def test_ranks_start_with_all_they_need_and_their_progress_is_reported(stage: Stage) -> None:
    agent = await stage.running({"say": "RANK {rank} {environment}"})
    report = (await stage.coordinator.until(lambda r: r.progress and r.warm, "progress")).report
    assert report.progress and report.progress.attempt == 1 and report.progress.step >= 1
    assert [(rank.local_rank, rank.global_rank) for rank in report.ranks] == [(0, 0), (1, 1)]
    names = agent.descendants()
    assert {names[rank.pid] for rank in report.ranks} == {"ltrank-0", "ltrank-1"}
    said = [line for line in agent.output.read_text().splitlines() if line.startswith("RANK 1 ")]
    environment = json.loads(said[0].removeprefix("RANK 1 "))
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29501",
    }
    assert expected.items() <= environment.items()
    assert json.loads(environment["LLMTRAIN_LAUNCH"])["runId"] == "team/job"


@on_stage
async def test_killed_rank_is_reported_at_once_and_the_others_live_until_the_order_comes(stage: Stage) -> None:
    agent = await stage.running()
    victim, other = stage.coordinator.received[-1].report.ranks
    os.kill(victim.pid, signal.SIGKILL)
    received = await stage.coordinator.until(lambda r: any(k.state == "exited" for k in r.ranks), "the exit")
    dead, living = received.report.ranks
    assert (dead.signal, dead.exit_code, dead.by_agent, dead.oom_killed) == (signal.SIGKILL, None, False, False)
    assert living.state == "running" and dead.exited_at is not None and dead.exited_at <= received.at
    before = len(stage.coordinator.received)
    await stage.coordinator.give(run_order(2))
    await stage.coordinator.until(lambda r: is_running(r, 2), "attempt 2 runs", before)
    assert other.pid not in agent.descendants()
