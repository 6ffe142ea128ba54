"""A rank that stops without ending: it is named, killed and started anew, and no bit of the losses changes."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.integration.local.conftest import Losses, Start
from tests.integration.local.harness import Run, bits, eventually

pytestmark = pytest.mark.timeout(600)
HANG = {"failurePolicy_hang": {"factor": 3, "floorSeconds": 3}}


def agent_events(run: Run, name: str) -> list[dict[str, Any]]:
    """Return the agents' log lines of this event."""
    logs = [file.read_text(errors="replace") for file in run.records.rglob("log")]
    lines = [line for log in logs for line in log.splitlines() if line.startswith('{"time"')]
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_stopped_rank_is_named_and_the_job_goes_on(new_run: Start, reference: Losses) -> None:
    run = new_run(**HANG)
    run.start()
    run.wait_for_step(8)
    agents = {index: agent.pid for index, agent in run.agents().items()}
    stopped = eventually(lambda: run.ranks().get(3), "rank 3 runs")
    stopped.send_signal(signal.SIGSTOP)
    run.wait_for_step(6, attempt=2)
    assert {index: agent.pid for index, agent in run.agents().items()} == agents, "restarted in place"
    assert not stopped.is_running(), "SIGKILL ends a stopped process"
    run.succeed()
    assert bits(run.steps()) == reference
    [failure] = run.status()["failures"]
    assert (failure["class"], failure["action"], failure["rank"]) == ("Hang", "RestartRanks", 3), failure
    assert (failure["worker"], "process stopped" in failure["message"]) == (1, True), failure
    hanging = next(c for c in run.status()["conditions"] if c["type"] == "Hanging")
    assert (hanging["status"], hanging["reason"]) == ("False", "Stepping")
    told = {event["rank"]: event for event in agent_events(run, "hang_suspected")}
    assert sorted(told) == [0, 1, 2, 3], "the stacks of all ranks are in the logs"
    assert told[3]["process_state"] == "T" and not told[3]["stacks"]
    assert all("torch/distributed/" in told[rank]["stacks"] for rank in (0, 1, 2)), told
    run.assert_nothing_runs()
