"""Whatever the coordinator does or fails to do, ranks train on, and its next order is obeyed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from llmtrain_api.sync import MAX_BODY_BYTES
from tests.integration.agent.harness import Stage, eventually, is_running, on_stage, run_order


@on_stage
async def test_coordinator_restarts_while_ranks_train(stage: Stage) -> None:
    agent = await stage.running()
    pids = [rank.pid for rank in stage.coordinator.received[-1].report.ranks]
    await stage.coordinator.stop()
    await eventually(lambda: agent.event("coordinator_away"), "the agent notices")
    stage.coordinator.version = 1  # a new coordinator counts anew
    before = len(stage.coordinator.received)
    await stage.coordinator.start()
    report = (await stage.coordinator.until(lambda r: True, "the agent is back", before)).report
    assert is_running(report, 1) and [rank.pid for rank in report.ranks] == pids
    await stage.coordinator.give(run_order(2))
    await stage.coordinator.until(lambda r: is_running(r, 2), "attempt 2 runs", before)
    sequences = [received.report.sequence for received in stage.coordinator.received]
    assert sequences == sorted(set(sequences))


@on_stage
async def test_agent_that_starts_before_the_coordinator_waits_for_it(stage: Stage) -> None:
    await stage.coordinator.stop()
    agent = stage.agent()
    await eventually(lambda: agent.event("coordinator_away"), "the agent finds nobody")
    await stage.coordinator.start()
    await stage.coordinator.give(run_order(1))
    await stage.coordinator.until(lambda r: is_running(r, 1), "attempt 1 runs")


def refused(status: int) -> Callable[[], web.Response]:
    return lambda: web.json_response({"error": "no", "fix": "do it"}, status=status)


def says(body: str) -> Callable[[], web.Response]:
    return lambda: web.Response(text=body, content_type="application/json")


@pytest.mark.parametrize(
    ("answer", "event"),
    [
        pytest.param(refused(400), "coordinator_refused", id="400 malformed"),
        pytest.param(refused(401), "coordinator_refused", id="401 no token"),
        pytest.param(refused(403), "coordinator_refused", id="403 token of another job"),
        pytest.param(refused(404), "coordinator_refused", id="404 unknown, or just restarted"),
        pytest.param(refused(500), "coordinator_away", id="500"),
        pytest.param(refused(503), "coordinator_away", id="503 not ready"),
        pytest.param(lambda: web.Response(status=302, headers={"Location": "/"}), "coordinator_refused", id="302"),
        pytest.param(says("{"), "answer_malformed", id="broken JSON"),
        pytest.param(says("[]"), "answer_malformed", id="JSON of another shape"),
        pytest.param(says('{"version": "9", "order": {"kind": "dance"}}'), "answer_malformed", id="unknown order"),
        pytest.param(
            says('{"version": "9", "order": {"kind": "run", "attempt": 9}}'),
            "answer_malformed",
            id="run without assignment",
        ),
        pytest.param(says(" " * (MAX_BODY_BYTES + 1)), "answer_malformed", id="endless body"),
    ],
)
def test_refusals_and_nonsense_are_survived(tmp_path: Path, answer: Callable[[], web.Response], event: str) -> None:
    async def survived(stage: Stage) -> None:
        stage.coordinator.refusal = answer
        agent = stage.agent()
        line = await eventually(lambda: agent.event(event), "the agent says so")
        assert line["error"]
        stage.coordinator.refusal = None
        await stage.coordinator.give(run_order(1))
        await stage.coordinator.until(lambda r: is_running(r, 1), "attempt 1 runs")

    on_stage(survived)(tmp_path)


@on_stage
async def test_rotated_token_is_used_at_the_next_request(stage: Stage) -> None:
    agent = await stage.running()
    assert stage.coordinator.received[-1].token == "Bearer first-token"
    agent.token_file.unlink()
    await stage.coordinator.give(run_order(2))
    await eventually(lambda: agent.event("token_unreadable"), "the agent misses its token")
    agent.token_file.write_text("second-token")
    received = await stage.coordinator.until(lambda r: is_running(r, 2), "attempt 2 runs")
    assert received.token == "Bearer second-token"


@on_stage
async def test_coordinator_that_does_not_hold_is_not_flooded(stage: Stage) -> None:
    stage.coordinator.hold_seconds = 0
    agent = stage.agent()
    first = await stage.coordinator.until(lambda r: r.seen_version, "the first order in force")
    await eventually(lambda: stage.coordinator.received[-1].at > first.at + 2, "two seconds later")
    count = sum(first.at <= received.at <= first.at + 2 for received in stage.coordinator.received)
    assert count <= 8
    assert agent.process.poll() is None
