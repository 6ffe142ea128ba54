"""Ranks are started once, watched, and ended as ordered."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from llmtrain_api.sync import Order
from tests.integration.agent.harness import Stage, alive, eventually, has_ended, is_running, named, on_stage, run_order


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


@on_stage
async def test_what_a_rank_wrote_before_it_failed_is_in_the_report(stage: Stage) -> None:
    spec = {"steps": 1, "exitCode": 64, "message": "spec.data.sources[0].uri: no such folder"}
    stage.agent()
    await stage.coordinator.give(run_order(1, spec))
    ranks = (await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")).report.ranks
    assert [(rank.exit_code, rank.signal, rank.by_agent) for rank in ranks] == [(64, None, False)] * 2
    assert ranks[0].error and ranks[0].error.message == spec["message"]


@on_stage
async def test_exception_that_a_rank_lets_out_is_in_the_report(stage: Stage) -> None:
    stage.agent()
    await stage.coordinator.give(run_order(1, {"raise": "out of luck"}))
    rank = (await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")).report.ranks[0]
    assert rank.exit_code == 1 and rank.error
    assert (rank.error.message, rank.error.exception) == ("RuntimeError: out of luck", "RuntimeError")
    assert 'raise RuntimeError(spec["raise"])' in rank.error.traceback


@on_stage
async def test_same_attempt_ordered_again_starts_nothing(stage: Stage) -> None:
    await stage.running()
    pids = [rank.pid for rank in stage.coordinator.received[-1].report.ranks]
    for _ in range(3):
        await stage.coordinator.give(run_order(1))
        version = str(stage.coordinator.version)
        report = (await stage.coordinator.until(lambda r, v=version: r.seen_version == v, "the order in force")).report
        assert [rank.pid for rank in report.ranks] == pids and is_running(report, 1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")
    before = len(stage.coordinator.received)
    await stage.coordinator.give(run_order(1))
    version = str(stage.coordinator.version)
    report = (await stage.coordinator.until(lambda r: r.seen_version == version, "the order in force", before)).report
    assert has_ended(report, 1)


@on_stage
async def test_order_of_an_older_attempt_is_ignored(stage: Stage) -> None:
    agent = stage.agent()
    await stage.coordinator.give(run_order(5))
    await stage.coordinator.until(lambda r: is_running(r, 5), "attempt 5 runs")
    for order in (run_order(4), Order(kind="wait", attempt=3)):
        await stage.coordinator.give(order)
        await eventually(
            lambda v=str(stage.coordinator.version): [
                line for line in agent.log() if line["event"] == "order_stale" and line["version"] == v
            ],
            "the order is refused",
        )
        assert is_running(stage.coordinator.received[-1].report, 5)
        assert stage.coordinator.received[-1].report.seen_version != str(stage.coordinator.version)


@on_stage
async def test_twenty_restarts_in_place_leave_nothing_behind(stage: Stage) -> None:
    agent = await stage.running({"children": 1})
    forkserver = named(agent.descendants(), "lt-forkserver")[0]

    def holdings() -> dict[str, Any]:
        names = sorted(agent.descendants().values())
        files = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in (agent.pid, forkserver)}
        return {"processes": names, "files": files, "folders": len(list(agent.folder.glob("work/*/*")))}

    async def settled(attempt: int) -> None:
        before = len(stage.coordinator.received)
        await stage.coordinator.give(run_order(attempt, {"children": 1}))
        await stage.coordinator.until(lambda r: is_running(r, attempt), f"attempt {attempt} runs", before)
        await stage.coordinator.until(lambda r: r.progress and r.progress.attempt == attempt, "its progress", before)

    await settled(2)
    first = holdings()
    for attempt in range(3, 23):
        await settled(attempt)
    await eventually(lambda: holdings() == first, f"the same as after the first restart: {first}")
    assert named(agent.descendants(), "lt-forkserver") == [forkserver]


@on_stage
async def test_wait_ends_the_ranks_of_older_attempts_with_grace(stage: Stage) -> None:
    await stage.running({"sigtermSeconds": 0.2})
    await stage.coordinator.give(Order(kind="wait", attempt=1, grace_seconds=30))
    version = str(stage.coordinator.version)
    report = (await stage.coordinator.until(lambda r: r.seen_version == version, "the first order in force")).report
    assert is_running(report, 1)
    await stage.coordinator.give(Order(kind="wait", attempt=2, grace_seconds=30))
    report = (await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")).report
    assert [(rank.exit_code, rank.by_agent) for rank in report.ranks] == [(143, True)] * 2


@on_stage
async def test_rank_that_ignores_sigterm_is_killed_after_the_grace(stage: Stage) -> None:
    await stage.running({"ignoreSigterm": True})
    await stage.coordinator.give(Order(kind="wait", attempt=2, grace_seconds=0.3))
    report = (await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")).report
    assert [(rank.signal, rank.by_agent, rank.oom_killed) for rank in report.ranks] == [(9, True, False)] * 2


@on_stage
async def test_next_attempt_starts_only_after_all_of_the_older_is_gone(stage: Stage) -> None:
    agent = await stage.running({"ignoreSigterm": True, "children": 1, "detachedChildren": 1})
    await stage.coordinator.until(lambda r: r.progress, "children were started")
    forkserver = named(agent.descendants(), "lt-forkserver")[0]
    older = [pid for pid in agent.descendants() if pid != forkserver]
    assert len(older) == 6
    await stage.coordinator.give(run_order(2, {"say": "ATTEMPT {attempt} {rank}"}))
    report = (await stage.coordinator.until(lambda r: is_running(r, 2), "attempt 2 runs")).report
    assert not [pid for pid in older if alive(pid)]
    now = {forkserver, *(rank.pid for rank in report.ranks)}
    await eventually(lambda: set(agent.descendants()) == now, "zombies of the older attempt are reaped")


@on_stage
async def test_exit_order_ends_the_ranks_and_the_agent_with_its_code(stage: Stage) -> None:
    agent = await stage.running()
    await stage.coordinator.give(Order(kind="exit", attempt=1, exit_code=7, grace_seconds=30))
    assert await agent.exit_code() == 7
    last = stage.coordinator.received[-1].report
    assert last.stopping and [rank.exit_code for rank in last.ranks] == [143, 143]
    assert not list(agent.folder.glob("work/*"))
