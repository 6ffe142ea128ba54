"""A job's way from creation to its end, one plan at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain_api.constants import ConditionType, State
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.observed import Worker
from llmtrain_operator.core.plan import plan
from llmtrain_operator.core.times import to_timestamp
from tests.support.jobs import (
    NOW,
    JobBuilder,
    make_agent,
    make_gang,
    make_job,
    make_observed,
    make_progress,
    make_rank,
    make_worker,
)


def step(builder: JobBuilder, workers: list[Worker] | None = None, now: float = NOW, **fields: object) -> Plan:
    """Plan, and keep the status as the API server would."""
    decision = plan(make_observed(builder, workers or [], now=now, **fields))
    if decision.status_changed:
        builder.with_status(LLMTrainJobStatus.model_validate(decision.status.to_wire()))
    return decision


def ended_gang(exit_code: int = 0) -> list[Worker]:
    return [make_worker(i, agent=make_agent(i, 1, [make_rank(i, exit_code)])) for i in range(2)]


def kinds(decision: Plan) -> dict[str, str]:
    return {name: order.kind for name, order in decision.orders.items()}


def word(decision: Plan, kind: ConditionType) -> tuple[str, str]:
    condition = decision.status.condition(kind)
    assert condition is not None
    return condition.status, condition.reason


def test_a_new_job_gets_its_attempt_written_before_its_workers_are_made() -> None:
    decision = step(make_job().with_workers(3))
    assert decision.status_changed and decision.status.attempt == 1 and decision.status.started_attempt == 0
    assert [create.name for create in decision.create] == ["demo-w0-a1", "demo-w1-a1", "demo-w2-a1"]
    assert decision.status.state is State.PENDING and decision.status.start_time == to_timestamp(NOW)
    assert decision.status.workers.selector == "llmtrain.dev/job=demo"


def test_creation_is_repeated_until_the_worker_is_seen() -> None:
    builder = make_job()
    step(builder)
    assert [create.name for create in step(builder, [make_worker(0)]).create] == ["demo-w1-a1"]


def test_workers_wait_until_every_agent_is_connected() -> None:
    builder = make_job()
    step(builder)
    decision = step(builder, [*make_gang(attempt=0)[:1], make_worker(1, phase="Pending")])
    assert kinds(decision) == {"demo-w0-a1": "wait", "demo-w1-a1": "wait"}
    assert decision.status.workers.summary == "1/2"


def test_a_complete_gang_is_started_with_one_master_and_distinct_node_ranks() -> None:
    builder = make_job().with_workers(2, 4).with_spec(training={"globalBatchSize": 8})
    step(builder)
    decision = step(builder, make_gang(attempt=0))
    assert decision.status_changed and decision.status.started_attempt == 1
    assert decision.status.state is State.STARTING
    assignments = [decision.orders[f"demo-w{i}-a1"].assignment for i in range(2)]
    assert [a and (a.node_rank, a.num_nodes, a.ranks_per_worker) for a in assignments] == [(0, 2, 4), (1, 2, 4)]
    assert {a and (a.master_address, a.master_port) for a in assignments} == {("10.0.0.1", 29501)}
    assert assignments[0] and assignments[0].run_id == "lab/demo"
    assert assignments[0].spec == builder.build().spec.to_wire()


def test_the_first_step_is_written_at_once_and_later_ones_once_a_period() -> None:
    builder = make_job()
    step(builder)
    step(builder, make_gang(attempt=0))

    def at(seconds: float, steps: int) -> Plan:
        gang = make_gang()
        progress = make_progress(step=steps, checkpoint_step=steps - steps % 10 or -1)
        gang[0] = replace(gang[0], agent=make_agent(0, 1, progress=progress, last_seen=NOW + seconds))
        gang[1] = replace(gang[1], agent=make_agent(1, 1, last_seen=NOW + seconds))
        return step(builder, gang, NOW + seconds)

    first = at(1, 1)
    assert first.status_changed and first.status.state is State.TRAINING
    later = [at(1 + seconds, 1 + seconds) for seconds in range(1, 121)]
    assert sum(decision.status_changed for decision in later) == 4
    assert later[0].requeue_after == pytest.approx(12.0, abs=0.01)  # when silence would mean something
    assert builder.build().status.checkpoint.last_good_step == 120
    assert builder.build().status.checkpoint.uri == "pvc://checkpoints/demo/step-00000120"


@pytest.mark.parametrize(
    ("field", "reason"),
    [("skipped_checkpoints", "CheckpointSkipped"), ("failed_checkpoint", "CheckpointFailed")],
    ids=["skipped", "failed"],
)
def test_a_checkpoint_that_is_missed_is_told_once(field: str, reason: str) -> None:
    builder = make_job().running()

    def told(text: str, now: float) -> list[str]:
        gang = make_gang()
        progress = make_progress(step=5, **{field: text})
        gang[0] = replace(gang[0], agent=make_agent(0, 1, progress=progress, last_seen=now))
        events = step(builder, gang, now).events
        return [event.message for event in events if event.reason == reason]

    assert told("", NOW + 60) == []
    assert told("step-00000080: __0_0.distcp is missing", NOW + 120) == ["step-00000080: __0_0.distcp is missing"]
    assert told("step-00000080: __0_0.distcp is missing", NOW + 180) == []
    assert told("", NOW + 240) == []
    assert getattr(builder.build().status.checkpoint, field.partition("_")[0]) == ""


def test_all_ranks_at_zero_is_success() -> None:
    builder = make_job().running()
    decision = step(builder, ended_gang())
    assert decision.status.state is State.SUCCEEDED
    assert decision.status.completion_time == to_timestamp(NOW)
    assert word(decision, ConditionType.COMPLETE) == ("True", "Succeeded")
    assert [(o.kind, o.exit_code) for o in decision.orders.values()] == [("exit", 0), ("exit", 0)]
    assert [event.reason for event in decision.events] == ["Succeeded"]


def test_success_of_some_ranks_waits_for_the_others() -> None:
    workers = [ended_gang()[0], make_gang()[1]]
    decision = step(make_job().running(), workers)
    assert decision.status.state is State.TRAINING and decision.requeue_after is not None
    assert kinds(decision) == {"demo-w0-a1": "run", "demo-w1-a1": "run"}


def test_a_worker_that_left_after_all_its_ranks_ended_well_is_no_failure() -> None:
    left = make_worker(0, phase="Succeeded", exit_code=0, agent=make_agent(0, 2, [make_rank(0, 0)]))
    decision = step(make_job().running(attempt=2), [left, make_gang(attempt=2)[1]])
    assert decision.status.attempt == 2 and not decision.create


def test_a_settled_job_costs_nothing() -> None:
    builder = make_job().running()
    step(builder, ended_gang())
    gone = [replace(worker, phase="Succeeded", exit_code=0) for worker in ended_gang()]
    decision = step(builder, gone, NOW + 100)
    assert decision == Plan(status=builder.build().status, status_changed=False)


def test_workers_that_do_not_leave_after_the_end_are_deleted() -> None:
    builder = make_job().running()
    step(builder, ended_gang())
    early = step(builder, ended_gang(), NOW + 9)
    assert not early.delete and early.requeue_after == pytest.approx(1)
    assert [d.name for d in step(builder, ended_gang(), NOW + 10).delete] == ["demo-w0-a1", "demo-w1-a1"]


def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    builder = make_job().with_spec(ttlSecondsAfterFinished=60).running()
    step(builder, ended_gang())
    waiting = step(builder, [], NOW + 59)
    assert not waiting.delete_job and waiting.requeue_after == pytest.approx(1)
    assert step(builder, [], NOW + 60).delete_job


def test_a_time_to_live_of_zero_waits_until_the_end_is_written() -> None:
    builder = make_job().with_spec(ttlSecondsAfterFinished=0).running()
    decision = step(builder, ended_gang())
    assert not decision.delete_job and decision.requeue_after == 0
    assert step(builder, ended_gang()).delete_job


@pytest.mark.parametrize(
    "builder",
    [
        pytest.param(make_job().with_metadata(deletionTimestamp=to_timestamp(NOW)).running(), id="being deleted"),
        pytest.param(make_job().with_spec(managedBy="example.com/other").running(), id="managed by somebody else"),
    ],
)
def test_a_job_that_is_not_ours_is_left_alone(builder: JobBuilder) -> None:
    assert step(builder, make_gang()) == Plan(status=builder.build().status, status_changed=False)


def test_an_invalid_spec_blocks_the_job_and_says_what_to_do() -> None:
    builder = make_job()
    errors = ("spec.training.globalBatchSize is 7: use a multiple of 2",)
    decision = step(builder, spec_errors=errors)
    assert decision.status.state is State.BLOCKED and not decision.create
    assert word(decision, ConditionType.ACCEPTED) == ("False", "InvalidSpec")
    assert decision.status.message == errors[0]
    assert [event.reason for event in decision.events] == ["Blocked"]
    assert not step(builder, spec_errors=errors, now=NOW + 5).status_changed
    fixed = step(builder, now=NOW + 10)
    assert word(fixed, ConditionType.ACCEPTED) == ("True", "Valid") and len(fixed.create) == 2


def test_a_store_of_another_job_blocks_the_job() -> None:
    decision = step(make_job(), store_owner="lab/older")
    assert word(decision, ConditionType.ACCEPTED) == ("False", "StoreConflict")
    for part in ("spec.checkpoint.store", "'pvc://checkpoints/demo'", "lab/older", "another folder"):
        assert part in decision.status.message


def test_suspension_stops_all_workers_gracefully_and_resumption_goes_on_with_new_ones() -> None:
    builder = make_job().running().with_spec(suspend=True)
    decision = step(builder, make_gang())
    assert decision.status.state is State.SUSPENDED and decision.status.start_time is None
    assert [(d.name, d.grace_seconds) for d in decision.delete] == [("demo-w0-a1", None), ("demo-w1-a1", None)]
    assert {(o.kind, o.attempt, o.grace_seconds) for o in decision.orders.values()} == {("wait", 2, 60.0)}
    assert word(decision, ConditionType.SUSPENDED) == ("True", "SuspendedByOwner")
    assert not step(builder, [], NOW + 5).status_changed

    builder.with_spec(suspend=False)
    resumed = step(builder, [], NOW + 100)
    assert resumed.status.attempt == 2 and resumed.status.start_time == to_timestamp(NOW + 100)
    assert [create.name for create in resumed.create] == ["demo-w0-a2", "demo-w1-a2"]
    assert "Resumed" in [event.reason for event in resumed.events]
    assert word(resumed, ConditionType.SUSPENDED) == ("False", "Resumed")


def test_resumed_workers_do_not_start_while_suspended_ones_write_their_checkpoint() -> None:
    builder = make_job().running().with_spec(suspend=True)
    step(builder, make_gang())
    builder.with_spec(suspend=False)
    leaving = [replace(worker, deleting=True) for worker in make_gang()]
    new = make_gang(attempt=0, created_attempt=2)
    step(builder, leaving)
    decision = step(builder, [*leaving, *new], NOW + 1)
    assert decision.status.started_attempt == 1 and decision.requeue_after == pytest.approx(59)
    assert step(builder, new, NOW + 2).status.started_attempt == 2


def test_a_job_created_suspended_begins_when_it_is_resumed() -> None:
    builder = make_job().with_spec(suspend=True)
    decision = step(builder)
    assert decision.status.attempt == 0 and not decision.create
    assert len(step(builder.with_spec(suspend=False)).create) == 2


def test_a_resize_moves_to_a_new_gang_without_a_failure() -> None:
    builder = make_job()
    step(builder)
    step(builder, make_gang(attempt=0))
    step(builder, make_gang())
    builder.with_spec(workers={"replicas": 3})
    decision = step(builder, make_gang())
    assert decision.status.attempt == 2 and not decision.status.failures and decision.status.restarts.total == 0
    assert [(d.name, d.grace_seconds) for d in decision.delete] == [("demo-w0-a1", None), ("demo-w1-a1", None)]
    assert [create.name for create in decision.create] == ["demo-w0-a2", "demo-w1-a2", "demo-w2-a2"]
    assert {(o.kind, o.grace_seconds) for o in decision.orders.values()} == {("wait", 60.0)}
    assert "Resized" in [event.reason for event in decision.events]


def test_a_wiped_status_never_reuses_a_name_or_an_attempt() -> None:
    workers = [make_worker(0, created_attempt=5, agent=make_agent(0, attempt=7))]
    decision = step(make_job(), workers)
    assert decision.status.attempt == 8
    assert [create.name for create in decision.create] == ["demo-w1-a8"]
