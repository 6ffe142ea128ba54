"""What users of other operators have reported as bugs, tried on ours; docs/reference/bug_reports.md is the map."""

from __future__ import annotations

import pytest

from llmtrain_api.constants import ConditionType, State
from tests.support.jobs import NOW, JobBuilder, decide, make_agent, make_gang, make_job, make_rank, make_worker


def _crash_with_fresh_pods(builder: JobBuilder, now: float) -> State | None:
    """Gather and start a gang of pods made for this very attempt, and have rank 1 crash."""
    attempt = builder.build().status.attempt
    for later in (0.0, 200.0):  # restarts without progress wait for their back-off
        fresh = make_gang(attempt=0, created_attempt=attempt, last_seen=now + later)
        decide(builder, fresh, now + later)
    now += 300
    assert builder.build().status.started_attempt == attempt
    ranks = (make_rank(0), make_rank(1, signal=9, exited_at=now + 1))
    agents = [make_agent(i, attempt, [rank], last_seen=now + 2) for i, rank in enumerate(ranks)]
    broken = [make_worker(i, attempt, agent=agent) for i, agent in enumerate(agents)]
    return decide(builder, broken, now + 2).status.state


def test_pods_made_anew_do_not_begin_a_new_count_of_restarts() -> None:
    builder = make_job().with_budgets(crash=3).running()
    states = []
    while State.FAILED not in states and len(states) < 10:
        states.append(_crash_with_fresh_pods(builder, NOW + 1000.0 * len(states)))
    assert states == [State.RESTARTING] * 3 + [State.FAILED]
    assert builder.build().status.restarts.total == 3


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
def test_a_job_that_is_over_makes_no_worker_when_its_pods_were_deleted(state: State) -> None:
    builder = make_job().running(state=state)
    for later in (0.0, 60.0, 1e6):
        decision = decide(builder, [], NOW + later)
        assert decision.status.state is state
        assert not decision.create and not decision.orders


def test_a_resumed_job_no_longer_says_that_it_is_suspended() -> None:
    builder = make_job().with_spec(suspend=True)
    assert decide(builder, []).status.state is State.SUSPENDED
    builder.with_spec(suspend=False)
    status = decide(builder, [], NOW + 1).status
    condition = status.condition(ConditionType.SUSPENDED)
    assert status.state is State.PENDING
    assert condition is None or condition.status == "False"


def test_a_job_created_suspended_makes_no_worker_at_all() -> None:
    builder = make_job().with_spec(suspend=True)
    for later in (0.0, 1.0, 1000.0):
        assert not decide(builder, [], NOW + later).create
