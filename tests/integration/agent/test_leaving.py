"""How an agent ends: by a signal, by its absence, by its replacement; and that nothing outlives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

import pytest
from aiohttp import web

from tests.integration.agent.harness import (
    REPOSITORY,
    Stage,
    alive,
    eventually,
    has_ended,
    is_running,
    named,
    on_stage,
    run_order,
)

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL")


@on_stage
async def test_sigterm_is_forwarded_and_everything_is_told_before_the_end(stage: Stage) -> None:
    agent = await stage.running({"sigtermSeconds": 0.3})
    os.kill(agent.pid, signal.SIGTERM)
    first = (await stage.coordinator.until(lambda r: r.stopping, "the agent says that it stops")).report
    assert is_running(first, 1)
    assert await agent.exit_code() == 143
    last = stage.coordinator.received[-1].report
    assert has_ended(last, 1) and [(rank.exit_code, rank.by_agent) for rank in last.ranks] == [(143, True)] * 2
    assert not list(agent.folder.glob("work/*"))


@on_stage
async def test_sigterm_to_an_idle_agent_ends_it(stage: Stage) -> None:
    agent = stage.agent()
    await stage.coordinator.until(lambda r: True, "the first report")
    os.kill(agent.pid, signal.SIGTERM)
    assert await agent.exit_code() == 143


@on_stage
async def test_sigterm_after_all_ranks_succeeded_is_a_success(stage: Stage) -> None:
    agent = stage.agent()
    await stage.coordinator.give(run_order(1, {"steps": 1}))
    await stage.coordinator.until(lambda r: has_ended(r, 1), "both exits")
    os.kill(agent.pid, signal.SIGTERM)
    assert await agent.exit_code() == 0


@on_stage
async def test_sigint_gives_ranks_that_ignore_sigterm_the_grace_and_no_more(stage: Stage) -> None:
    agent = await stage.running({"ignoreSigterm": True}, LLMTRAIN_GRACE_SECONDS="1")
    os.kill(agent.pid, signal.SIGINT)
    assert await agent.exit_code() == 143
    assert [rank.signal for rank in stage.coordinator.received[-1].report.ranks] == [9, 9]


@on_stage
async def test_second_signal_hurries(stage: Stage) -> None:
    agent = await stage.running({"ignoreSigterm": True}, LLMTRAIN_GRACE_SECONDS="3600")
    os.kill(agent.pid, signal.SIGTERM)
    await stage.coordinator.until(lambda r: r.stopping, "the agent says that it stops")
    os.kill(agent.pid, signal.SIGTERM)
    assert await agent.exit_code() == 143


@on_stage
async def test_sigterm_ends_the_agent_also_when_the_coordinator_is_away(stage: Stage) -> None:
    agent = await stage.running()
    await stage.coordinator.stop()
    os.kill(agent.pid, signal.SIGTERM)
    assert await agent.exit_code() == 143
    await stage.coordinator.start()


@on_stage
async def test_agent_that_is_killed_takes_everything_along(stage: Stage) -> None:
    agent = await stage.running()
    family = agent.descendants()
    assert sorted(family.values()) == ["lt-forkserver", "ltrank-0", "ltrank-1"]
    os.kill(agent.pid, signal.SIGKILL)
    await eventually(lambda: not [pid for pid in family if alive(pid)], "all ranks and the fork-server end")


@on_stage
async def test_process_one_of_a_namespace_reaps_obeys_sigterm_and_takes_everything_along(stage: Stage) -> None:
    if not _can(NAMESPACE):
        pytest.skip("no right to make a pid namespace here; the tests above show the same code as an ordinary process")
    spec = {"children": 1, "detachedChildren": 1}
    agent = stage.agent(prefix=NAMESPACE)
    await stage.coordinator.give(run_order(1, spec))
    await stage.coordinator.until(lambda r: is_running(r, 1) and r.progress, "attempt 1 runs")
    inside = next(pid for pid, name in agent.descendants().items() if name.startswith("python"))
    assert agent.event("agent_started")["pid"] == 1
    before = len(stage.coordinator.received)
    await stage.coordinator.give(run_order(2, spec))
    await stage.coordinator.until(lambda r: is_running(r, 2) and r.progress, "attempt 2 runs", before)
    await eventually(lambda: len(agent.descendants()) == 1 + 1 + 2 * 3, "nothing is left of attempt 1")
    family = agent.descendants()
    os.kill(inside, signal.SIGTERM)
    assert await agent.exit_code() == 143
    await eventually(lambda: not [pid for pid in family if alive(pid)], "everything ends")


def _can(command: Sequence[str]) -> bool:
    return bool(shutil.which(command[0])) and subprocess.run([*command, "true"], capture_output=True).returncode == 0


@on_stage
async def test_idle_agent_leaves_when_the_coordinator_stays_away(stage: Stage) -> None:
    agent = stage.agent(LLMTRAIN_ORPHAN_SECONDS="0.5")
    await stage.coordinator.until(lambda r: True, "the first report")
    await stage.coordinator.stop()
    assert await agent.exit_code() == 0
    await stage.coordinator.start()


@on_stage
async def test_training_agent_does_not_leave_until_its_ranks_are_done(stage: Stage) -> None:
    agent = stage.agent(LLMTRAIN_ORPHAN_SECONDS="0.5")
    await stage.coordinator.give(run_order(1, {"steps": 1, "stepSeconds": 2}))
    await stage.coordinator.until(lambda r: is_running(r, 1), "attempt 1 runs")
    await stage.coordinator.stop()
    assert await agent.exit_code() == 0
    exits = [line for line in agent.log() if line["event"] == "rank_exited"]
    assert [(line["exit_code"], line["by_agent"]) for line in exits] == [(0, False)] * 2
    await stage.coordinator.start()


@on_stage
async def test_superseded_agent_kills_its_ranks_and_leaves(stage: Stage) -> None:
    agent = await stage.running({"ignoreSigterm": True})
    family = agent.descendants()
    stage.coordinator.refusal = lambda: web.json_response({"error": "another agent has this worker"}, status=409)
    os.kill(named(family, "ltrank-1")[0], signal.SIGKILL)  # news: the held request is abandoned
    assert await agent.exit_code() == 1
    assert agent.event("superseded")["error"] == "another agent has this worker"
    await eventually(lambda: not [pid for pid in family if alive(pid)], "everything ends")


FAULT = """
import sys

if any("llmtrain_trainer.agent.main" in word for word in sys.orig_argv):
    from llmtrain_trainer.agent.client import SyncClient

    async def run(self):
        await self._exchange()
        raise RuntimeError("a defect of ours")

    SyncClient.run = run
"""


@on_stage
async def test_agent_whose_sync_fails_by_a_defect_ends_rather_than_train_on_unled(stage: Stage) -> None:
    (stage.folder / "sitecustomize.py").write_text(FAULT)
    agent = stage.agent(PYTHONPATH=f"{stage.folder}:{REPOSITORY}")
    assert await agent.exit_code() == 1
    assert "a defect of ours" in agent.event("sync_failed")["error"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        pytest.param("LLMTRAIN_POD_NAME", "", id="missing"),
        pytest.param("LLMTRAIN_GRACE_SECONDS", "soon", id="no number"),
    ],
)
def test_wrong_environment_is_named(tmp_path, variable: str, value: str) -> None:
    async def named_and_64(stage: Stage) -> None:
        agent = stage.agent(**{variable: value})
        assert await agent.exit_code() == 64
        assert variable in agent.event("environment_wrong")["problem"]

    on_stage(named_and_64)(tmp_path)
