"""Every waiting phase ends, with a message that says what was waited for and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmtrain_api.constants import Action, ConditionType, FailureClass, State
from llmtrain_operator.core.observed import Worker
from tests.support.jobs import (
    NOW,
    JobBuilder,
    decide,
    make_agent,
    make_gang,
    make_job,
    make_progress,
    make_rank,
    make_worker,
)


def gathering(**deadlines: int) -> JobBuilder:
    builder = make_job().with_deadlines(**deadlines)
    decide(builder, [])
    return builder


def pending(**fields: Any) -> list[Worker]:
    return [
        make_worker(0, created_at=NOW, agent=make_agent(last_seen=NOW + 200)),
        make_worker(1, created_at=NOW, phase="Pending", **fields),
    ]


def test_a_worker_pending_too_long_is_replaced_and_the_message_says_why() -> None:
    builder = gathering(pendingSeconds=100)
    workers = pending(unschedulable_message="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    waiting = decide(builder, workers, NOW + 40)
    assert waiting.requeue_after == pytest.approx(60)
    assert "Insufficient nvidia.com/gpu" in waiting.status.message
    decision = decide(builder, workers, NOW + 100)
    failure = decision.status.failures[0]
    assert (failure.failure_class, failure.action) == (FailureClass.STARTUP, Action.REPLACE_WORKER)
    assert "has not reported within 100 s: 0/3 nodes" in failure.message
    assert [create.name for create in decision.create] == ["demo-w1-a2"]
    assert [(d.name, d.grace_seconds) for d in decision.delete] == [("demo-w1-a1", 0.0)]


def test_a_worker_that_cannot_be_created_does_not_wait_for_ever() -> None:
    builder = gathering(pendingSeconds=100)
    builder.with_budgets(startup=1)
    assert decide(builder, [], NOW + 40).requeue_after == pytest.approx(60)
    again = decide(builder, [], NOW + 100)
    assert "worker 0 could not be created within 100 s" in again.status.failures[0].message
    assert [create.name for create in again.create] == ["demo-w0-a2", "demo-w1-a2"]
    ended = decide(builder, [], NOW + 200)
    assert ended.status.state is State.FAILED
    assert "WriteFailed" in ended.status.message


def test_pending_for_ever_fails_the_job_when_the_budget_is_used() -> None:
    builder = gathering(pendingSeconds=100)
    builder.with_budgets(startup=1)
    decide(builder, pending(), NOW + 100)
    second = [
        make_worker(0, agent=make_agent(last_seen=NOW + 300)),
        make_worker(1, 2, created_at=NOW + 101, phase="Pending"),
    ]
    decision = decide(builder, second, NOW + 300)
    assert decision.status.state is State.FAILED
    assert "spec.failurePolicy.budgets.startup" in decision.status.message


@pytest.mark.parametrize(
    ("reason", "after"),
    [
        pytest.param("ErrImagePull", 200, id="pull error"),
        pytest.param("ImagePullBackOff", 200, id="pull back-off"),
        pytest.param("InvalidImageName", 10, id="not a name"),
        pytest.param("CreateContainerConfigError", 10, id="configuration"),
        pytest.param("CreateContainerError", 10, id="container"),
    ],
)
def test_an_image_that_cannot_run_fails_the_job_and_names_the_field(reason: str, after: float) -> None:
    builder = gathering(imagePullSeconds=200)
    workers = pending(waiting_reason=reason, waiting_message="not found", waiting_since=NOW)
    assert decide(builder, workers, NOW + after - 1).requeue_after == pytest.approx(1)
    decision = decide(builder, workers, NOW + after)
    assert decision.status.state is State.FAILED
    for part in (reason, "not found", "spec.workers.image", "'llmtrain/trainer:test'"):
        assert part in decision.status.message
    assert decision.status.failures[0].failure_class is FailureClass.STARTUP


def test_an_image_that_has_trained_before_is_not_blamed_for_one_node() -> None:
    builder = gathering(imagePullSeconds=200)
    decide(builder, pending())
    progress = {
        "step": 9,
        "steps": 100,
        "tokens": "1",
        "loss": "1",
        "tokensPerSecond": "1",
        "updatedAt": "2027-01-15T08:00:00Z",
    }
    builder.with_status(progress=progress)
    decision = decide(builder, pending(waiting_reason="ErrImagePull", waiting_since=NOW), NOW + 200)
    assert decision.status.failures[0].action is Action.REPLACE_WORKER


def test_no_first_step_in_time_restarts_the_attempt() -> None:
    builder = gathering(startSeconds=50)
    decide(builder, make_gang(attempt=0), NOW + 10)
    fresh = [replace(w, agent=replace(w.agent, last_seen=NOW + 59)) for w in make_gang() if w.agent]
    assert decide(builder, fresh, NOW + 59).requeue_after == pytest.approx(1)
    decision = decide(builder, fresh, NOW + 60)
    failure = decision.status.failures[0]
    assert (failure.failure_class, failure.action) == (FailureClass.STARTUP, Action.RESTART_RANKS)
    assert "startSeconds" in failure.message and decision.status.started_attempt == 2


def test_a_restarted_operator_gives_a_starting_attempt_its_time_again() -> None:
    builder = gathering(startSeconds=50)
    decide(builder, make_gang(attempt=0))
    fresh = [replace(w, agent=replace(w.agent, last_seen=NOW + 500)) for w in make_gang() if w.agent]
    assert decide(builder, fresh, NOW + 500, observing_since=NOW + 499).status.attempt == 1


def test_ranks_that_go_on_after_others_have_ended_well_are_restarted_in_the_end() -> None:
    builder = make_job().with_deadlines(startSeconds=50).running()
    decide(builder, make_gang())
    workers = [make_worker(0, agent=make_agent(0, 1, [make_rank(0, 0, exited_at=NOW)])), make_gang()[1]]
    assert decide(builder, workers, NOW + 49).status.attempt == 1
    decision = decide(builder, workers, NOW + 50)
    assert "1 of 2 ranks ended" in decision.status.failures[0].message


def test_the_active_deadline_fails_the_job() -> None:
    builder = make_job().with_spec(activeDeadlineSeconds=100).running()
    assert decide(builder, make_gang(), NOW + 39).requeue_after == pytest.approx(1)
    decision = decide(builder, make_gang(), NOW + 40)
    condition = decision.status.condition(ConditionType.FAILED)
    assert decision.status.state is State.FAILED and condition and condition.reason == "DeadlineExceeded"
    assert "spec.activeDeadlineSeconds" in decision.status.message


def test_time_in_suspension_is_not_active_time() -> None:
    builder = make_job().with_spec(activeDeadlineSeconds=100).running()
    decide(builder.with_spec(suspend=True), make_gang(), NOW + 39)
    decision = decide(builder.with_spec(suspend=False), [], NOW + 5000)
    assert decision.status.state is not State.FAILED and decision.requeue_after == pytest.approx(100)


def test_a_silent_worker_is_lost_while_others_report_and_its_node_is_left() -> None:
    builder = make_job().running()
    decide(builder, make_gang())
    gang = make_gang()
    late = [replace(gang[0], agent=make_agent(0, 1, progress=make_progress(), last_seen=NOW + 12.1)), gang[1]]
    assert decide(builder, late, NOW + 11.9).status.attempt == 1
    decision = decide(builder, late, NOW + 12.1)
    failure = decision.status.failures[0]
    assert (failure.failure_class, failure.worker) == (FailureClass.NODE_LOST, 1)
    assert failure.action is Action.REPLACE_NODE
    assert "silent for 12 s on node node-1: while others report" in failure.message
    assert [create.avoid_nodes for create in decision.create] == [("node-1",)]
    assert [(d.name, d.grace_seconds) for d in decision.delete] == [("demo-w1-a1", 0.0)]


def test_when_nobody_reports_it_is_the_operator_that_is_cut_off() -> None:
    builder = make_job().running()
    decide(builder, make_gang())
    assert decide(builder, make_gang(), NOW + 3600).status.attempt == 1


def test_the_only_worker_of_a_job_is_lost_when_agents_of_other_jobs_report() -> None:
    builder = make_job().with_workers(1).running()
    gang = make_gang(1)
    assert decide(builder, gang, NOW + 60, heard_at=NOW + 1).status.attempt == 1
    assert decide(builder, gang, NOW + 60, heard_at=NOW + 59).status.failures[0].failure_class is FailureClass.NODE_LOST


def test_an_operator_that_stood_still_takes_nobody_for_lost() -> None:
    builder = make_job().running()
    gang = make_gang()
    gang[0] = replace(gang[0], agent=make_agent(0, 1, last_seen=NOW + 60))
    assert decide(builder, gang, NOW + 60, observing_since=NOW + 59).status.attempt == 1


@pytest.mark.parametrize(
    ("last_seen", "lost"),
    [pytest.param(NOW - 6, True, id="silent too"), pytest.param(NOW - 4, False, id="its agent still reports")],
)
def test_a_node_that_is_gone_is_believed_when_its_agent_is_silent_too(last_seen: float, lost: bool) -> None:
    gang = make_gang(1, last_seen=last_seen)
    gone = [replace(gang[0], node_lost="the node's condition Ready is Unknown (NodeStatusUnknown)")]
    status = decide(make_job().with_workers(1).running(), gone).status
    assert (status.attempt == 2) is lost
    if lost:
        assert status.failures[0].failure_class is FailureClass.NODE_LOST
        assert "Ready is Unknown" in status.failures[0].message


def test_a_worker_pending_on_a_node_that_went_away_is_made_anew_at_once() -> None:
    builder = gathering(pendingSeconds=1000)
    workers = [make_worker(0, created_at=NOW, phase="Pending", node_lost="the node does not exist any more")]
    assert decide(builder, workers, NOW + 2).status.attempt == 1
    decision = decide(builder, workers, NOW + 13)
    assert decision.status.attempt == 2 and decision.status.failures[0].failure_class is FailureClass.NODE_LOST


def test_avoided_nodes_are_forgiven_when_there_is_no_other_place() -> None:
    """A job on a cluster without a spare node must not wait for ever for one."""
    builder = make_job().running()
    gang = make_gang()
    lost = [gang[0], replace(gang[1], node_lost="gone", agent=replace(gang[1].agent, last_seen=NOW - 6))]
    decide(builder, lost)
    waiting = make_worker(
        1, 2, created_at=NOW, phase="Pending", node="", unschedulable_message="0/2 nodes", avoids=("node-1",)
    )
    kept = replace(gang[0], agent=make_agent(0, 1, last_seen=NOW + 30))
    early = decide(builder, [kept, waiting], NOW + 29)
    assert early.status.attempt == 2 and early.requeue_after == pytest.approx(1.0)
    forgiving = decide(builder, [kept, waiting], NOW + 30)
    assert forgiving.status.attempt == 3 and len(forgiving.status.failures) == 1
    assert [(create.name, create.avoid_nodes) for create in forgiving.create] == [("demo-w1-a3", ())]
    assert [delete.name for delete in forgiving.delete] == ["demo-w1-a2"]
    assert "NodesForgiven" in [event.reason for event in forgiving.events]


@pytest.mark.parametrize(
    ("observing_since", "replaced"),
    [(None, False), (NOW + 1000 - 11, False), (NOW + 1000 - 13, True)],
    ids=["unknown", "operator restarted just now", "operator back for long"],
)
def test_an_agent_that_never_came_back_to_a_restarted_operator(observing_since: float | None, replaced: bool) -> None:
    builder = make_job().running()
    decide(builder, make_gang())
    gang = [make_worker(0, agent=make_agent(0, 1, last_seen=NOW + 1000)), make_worker(1)]
    decision = decide(builder, gang, NOW + 1000, observing_since=observing_since)
    assert (decision.status.attempt == 2) is replaced


def test_a_restarted_operator_gives_running_workers_time_to_report_again() -> None:
    builder = gathering(pendingSeconds=100)
    workers = [make_worker(i, created_at=NOW) for i in range(2)]
    assert decide(builder, workers, NOW + 150, observing_since=NOW + 149).status.attempt == 1
    assert decide(builder, workers, NOW + 250, observing_since=NOW + 149).status.attempt == 2


def test_a_worker_that_does_not_come_back_to_a_restarted_operator_is_looked_at_in_time() -> None:
    builder = make_job().running()
    decide(builder, make_gang())
    unheard = [make_worker(i) for i in range(2)]
    look = decide(builder, unheard, NOW, observing_since=NOW, heard_at=NOW).requeue_after
    assert look is not None and 12.0 < look < 12.1
    status = decide(builder, unheard, NOW + look, observing_since=NOW, heard_at=NOW + look).status
    assert status.failures[-1].failure_class is FailureClass.NODE_LOST


def test_a_job_that_nobody_hears_of_is_looked_at_again_until_other_jobs_are_heard() -> None:
    builder = make_job().running()
    decide(builder, make_gang())
    decision = decide(builder, make_gang(), NOW + 60, observing_since=NOW - 99, heard_at=NOW)
    assert not decision.status.failures
    assert decision.requeue_after == 12.0
    status = decide(builder, make_gang(), NOW + 72, observing_since=NOW - 99, heard_at=NOW + 72).status
    assert status.failures[-1].failure_class is FailureClass.NODE_LOST


def test_a_silent_worker_on_a_node_that_is_gone_is_looked_at_after_five_seconds() -> None:
    builder = make_job().running()
    decide(builder, make_gang())
    gone, other = make_gang()
    gone = replace(gone, node_lost="its node is gone")
    other = make_worker(1, agent=make_agent(1, 1, last_seen=NOW + 2))
    look = decide(builder, [gone, other], NOW + 2, observing_since=NOW - 99).requeue_after
    assert look is not None and 3.0 < look < 3.1
    status = decide(builder, [gone, other], NOW + 2 + look, observing_since=NOW - 99).status
    assert status.failures[-1].failure_class is FailureClass.NODE_LOST
