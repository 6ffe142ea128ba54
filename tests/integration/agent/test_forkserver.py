"""The fork-server may die at any moment: its ranks are reported, and the next attempt runs on a new one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration.agent.harness import (
    AgentProcess,
    Stage,
    eventually,
    has_ended,
    is_running,
    named,
    on_stage,
    run_order,
)


@on_stage
async def test_killed_forkserver_is_the_end_of_its_ranks_and_is_replaced(stage: Stage) -> None:
    agent = await stage.running()
    first = named(agent.descendants(), "lt-forkserver")
    os.kill(first[0], signal.SIGKILL)
    report = (await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")).report
    assert [(rank.signal, rank.exit_code, rank.by_agent) for rank in report.ranks] == [(9, None, False)] * 2
    await stage.coordinator.give(run_order(2))
    await stage.coordinator.until(lambda r: is_running(r, 2), "attempt 2 runs")
    family = agent.descendants()
    assert sorted(family.values()) == ["lt-forkserver", "ltrank-0", "ltrank-1"]
    assert named(family, "lt-forkserver") != first


async def importing(stage: Stage) -> tuple[AgentProcess, Path]:
    """Start an agent with an order to run, whose fork-server imports until the returned file is there."""
    gate = stage.folder / "gate"
    agent = stage.agent(LLMTRAIN_RANK_ENTRY="tests.integration.agent.gated_import:run", GATE=str(gate))
    await stage.coordinator.give(run_order(1))
    await stage.coordinator.until(lambda r: not r.warm and r.seen_version == "2", "the order in force, but cold")
    return agent, gate


@on_stage
async def test_forkserver_killed_while_importing_delays_the_ranks_only(stage: Stage) -> None:
    agent, gate = await importing(stage)
    forkservers = await eventually(lambda: named(agent.descendants(), "lt-forkserver"), "the fork-server")
    os.kill(forkservers[0], signal.SIGKILL)
    await eventually(lambda: agent.event("forkserver_lost"), "the agent notices")
    gate.touch()
    report = (await stage.coordinator.until(lambda r: is_running(r, 1), "attempt 1 runs")).report
    assert report.warm


@on_stage
async def test_order_withdrawn_while_importing_starts_nothing(stage: Stage) -> None:
    agent, gate = await importing(stage)
    await stage.coordinator.give(run_order(2))
    await stage.coordinator.until(lambda r: r.seen_version == "3", "the second order in force")
    gate.touch()
    await stage.coordinator.until(lambda r: is_running(r, 2), "attempt 2 runs")
    assert [line["starting"] for line in agent.log() if line["event"] == "ranks_starting"] == [2]


@on_stage
async def test_forkserver_that_cannot_import_is_reported_and_not_waited_for(stage: Stage) -> None:
    stage.agent(LLMTRAIN_RANK_ENTRY="tests.integration.agent.deadly_import:run")
    await stage.coordinator.give(run_order(1))
    report = (await stage.coordinator.until(lambda r: has_ended(r, 1), "the failure")).report
    assert [rank.exit_code for rank in report.ranks] == [1, 1]
    assert report.ranks[0].error and "exited with code 3" in report.ranks[0].error.message


@on_stage
async def test_module_that_raises_at_import_is_the_ranks_failure(stage: Stage) -> None:
    stage.agent(LLMTRAIN_RANK_ENTRY="tests.integration.agent.no_such_module:run")
    await stage.coordinator.give(run_order(1))
    report = (await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")).report
    assert report.ranks[0].error and report.ranks[0].error.exception == "ModuleNotFoundError"
