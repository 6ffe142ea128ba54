"""From what broke to its class, its one cause, the action, and what the status then says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmtrain_api.constants import Action, FailureClass, State
from llmtrain_api.status import FailureStatus, LLMTrainJobStatus
from llmtrain_api.sync import RankReport
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.failures import classify_rank
from llmtrain_operator.core.observed import Worker
from llmtrain_operator.core.times import to_timestamp
from tests.support.jobs import (
    NOW,
    decide,
    make_agent,
    make_gang,
    make_job,
    make_progress,
    make_rank,
    make_worker,
)


def gang_with(*ranks: RankReport, attempt: int = 1, created_attempt: int = 1) -> list[Worker]:
    """One worker per rank."""
    return [
        make_worker(i, created_attempt, replicas=len(ranks), agent=make_agent(i, attempt, [rank]))
        for i, rank in enumerate(ranks)
    ]


def only_failure(decision: Plan) -> FailureStatus:
    assert len(decision.status.failures) == 1
    return decision.status.failures[0]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        pytest.param(make_rank(exit_code=64), FailureClass.USER_ERROR, id="64 is the user's"),
        pytest.param(make_rank(exit_code=75), FailureClass.COMMUNICATION, id="75 is a lost peer"),
        pytest.param(make_rank(exit_code=76), FailureClass.NUMERICS, id="76 is not finite"),
        pytest.param(make_rank(exit_code=78), FailureClass.CHECKPOINT, id="78 is an attempt that came too late"),
        pytest.param(make_rank(exit_code=77), FailureClass.CHECKPOINT, id="77 is a checkpoint"),
        pytest.param(make_rank(exit_code=143), FailureClass.DISRUPTION, id="143 is preemption"),
        pytest.param(make_rank(signal=15), FailureClass.DISRUPTION, id="SIGTERM before the handler is preemption"),
        pytest.param(make_rank(exit_code=1), FailureClass.CRASH, id="1 is a crash"),
        pytest.param(make_rank(exit_code=255), FailureClass.CRASH, id="255 is a crash"),
        pytest.param(make_rank(signal=9), FailureClass.CRASH, id="SIGKILL is a crash"),
        pytest.param(make_rank(signal=11), FailureClass.CRASH, id="SIGSEGV is a crash"),
        pytest.param(make_rank(signal=9, oom_killed=True), FailureClass.OUT_OF_MEMORY, id="the OOM killer"),
        pytest.param(make_rank(signal=9, by_agent=True), FailureClass.DISRUPTION, id="ended by its agent"),
        pytest.param(make_rank(state="exited"), FailureClass.CRASH, id="neither code nor signal"),
    ],
)
def test_every_exit_has_a_class(rank: RankReport, expected: FailureClass) -> None:
    assert classify_rank(rank) is expected


def test_a_crashed_rank_is_restarted_in_place_in_one_write() -> None:
    builder = make_job().running()
    decision = decide(builder, gang_with(make_rank(0), make_rank(1, signal=9)))
    status = decision.status
    assert decision.status_changed and (status.attempt, status.started_attempt) == (2, 2)
    assert not decision.create and not decision.delete
    assert {(o.kind, o.attempt) for o in decision.orders.values()} == {("run", 2)}
    failure = only_failure(decision)
    assert (failure.failure_class, failure.action) == (FailureClass.CRASH, Action.RESTART_RANKS)
    assert (failure.worker, failure.rank, failure.pod, failure.node) == (1, 1, "demo-w1-a1", "node-1")
    assert failure.message == "rank 1 on worker 1 was killed by signal 9 (SIGKILL)"
    assert failure.at == to_timestamp(NOW - 0.01)
    assert status.state is State.RESTARTING and status.restarts.by_worker_since_progress == {"1": 1}
    assert [event.reason for event in decision.events] == ["RestartRanks", "Started"]


def test_a_failure_is_counted_once_however_often_it_is_reported() -> None:
    builder = make_job().running()
    broken = gang_with(make_rank(0), make_rank(1, signal=9))
    decide(builder, broken)
    again = decide(builder, broken, NOW + 1)
    assert not again.status_changed and again.status.restarts.total == 1
    assert {(o.kind, o.attempt) for o in again.orders.values()} == {("run", 2)}


def test_the_second_crash_of_a_worker_without_progress_replaces_it() -> None:
    builder = make_job().running()
    decide(builder, gang_with(make_rank(0), make_rank(1, signal=9)))
    decision = decide(builder, gang_with(make_rank(0), make_rank(1, signal=9), attempt=2))
    assert decision.status.failures[-1].action is Action.REPLACE_WORKER
    assert [(d.name, d.grace_seconds) for d in decision.delete] == [("demo-w1-a1", 0.0)]
    assert [c.name for c in decision.create] == ["demo-w1-a3"]
    assert {(o.kind, o.attempt, o.grace_seconds) for o in decision.orders.values()} == {("wait", 3, 0.0)}


def test_a_replacement_decided_before_the_operator_died_is_still_made() -> None:
    builder = make_job().running()
    decide(builder, gang_with(make_rank(0), make_rank(1, signal=9)))
    decide(builder, gang_with(make_rank(0), make_rank(1, signal=9), attempt=2))
    after_restart = decide(builder, [make_worker(0), make_worker(1)], NOW + 5)
    assert [(d.name, d.grace_seconds) for d in after_restart.delete] == [("demo-w1-a1", 0.0)]
    assert [c.name for c in after_restart.create] == ["demo-w1-a3"]


def test_another_workers_crash_does_not_replace_this_one() -> None:
    builder = make_job().running()
    decide(builder, gang_with(make_rank(0), make_rank(1, signal=9)))
    decision = decide(builder, gang_with(make_rank(0, signal=9), make_rank(1), attempt=2))
    assert decision.status.failures[-1].action is Action.RESTART_RANKS


def test_an_advanced_checkpoint_refills_the_budgets() -> None:
    builder = make_job().running(
        restarts={"total": 6, "sinceProgress": {"Crash": 6}, "byWorkerSinceProgress": {"1": 1}}
    )
    gang = gang_with(make_rank(0), make_rank(1, signal=9))
    gang[0] = replace(gang[0], agent=make_agent(0, 1, progress=make_progress(step=12, checkpoint_step=10)))
    decision = decide(builder, gang)
    assert only_failure(decision).action is Action.RESTART_RANKS
    assert decision.status.restarts.since_progress == {"Crash": 1}


def test_an_exhausted_budget_fails_the_job_with_the_first_cause() -> None:
    builder = make_job().with_budgets(crash=1).running()
    decide(builder, gang_with(make_rank(0), make_rank(1, 1, message="IndexError: the first")))
    decision = decide(builder, gang_with(make_rank(0, 1, message="the second"), make_rank(1), attempt=2))
    status = decision.status
    assert status.state is State.FAILED and status.failures[-1].action is Action.FAIL_JOB
    assert status.message == (
        "rank 1 on worker 1 exited with code 1: IndexError: the first (Crash, 2 times without a new checkpoint; "
        "spec.failurePolicy.budgets.crash allows 1 restarts)"
    )
    assert [(o.kind, o.exit_code) for o in decision.orders.values()] == [("exit", 1), ("exit", 1)]
    assert [event.reason for event in decision.events] == ["Failed"]


def test_a_budget_of_zero_fails_at_once() -> None:
    decision = decide(make_job().with_budgets(numerics=0).running(), gang_with(make_rank(0, 76), make_rank(1)))
    assert decision.status.state is State.FAILED


def test_a_users_error_is_never_restarted_and_is_shown_word_for_word() -> None:
    message = "data.sources[0].uri is pvc://corpus/x: the folder is empty. Put .txt files there"
    decision = decide(make_job().running(), gang_with(make_rank(0, 75), make_rank(1, 64, message=message)))
    assert decision.status.state is State.FAILED and decision.status.message == message
    assert decision.status.attempt == 1 and only_failure(decision).action is Action.FAIL_JOB


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        pytest.param(
            [make_rank(0, 75), make_rank(1, signal=9)], (FailureClass.CRASH, 1), id="a crash beats a lost peer"
        ),
        pytest.param([make_rank(0, 1), make_rank(1, 76)], (FailureClass.NUMERICS, 1), id="a diagnosis beats a crash"),
        pytest.param(
            [make_rank(0, 1, exited_at=NOW - 1), make_rank(1, 1, exited_at=NOW - 2)],
            (FailureClass.CRASH, 1),
            id="the earlier of equals",
        ),
        pytest.param(
            [make_rank(0, 1, exited_at=NOW + 1e6), make_rank(1, 1, exited_at=NOW - 2)],
            (FailureClass.CRASH, 1),
            id="a time that cannot be is not the earlier",
        ),
        pytest.param([make_rank(0, 143), make_rank(1, 143)], (FailureClass.DISRUPTION, 0), id="all told to stop"),
        pytest.param([make_rank(0, 75), make_rank(1, 75)], (FailureClass.COMMUNICATION, 0), id="all lost a peer"),
    ],
)
def test_of_several_reports_one_is_the_cause(ranks: list[RankReport], cause: tuple[FailureClass, int]) -> None:
    failure = only_failure(decide(make_job().running(), gang_with(*ranks)))
    assert (failure.failure_class, failure.rank) == cause


@pytest.mark.parametrize("code", [75, 143])
def test_a_symptom_waits_a_moment_for_its_cause(code: int) -> None:
    builder = make_job().running()
    broken = gang_with(make_rank(0, code, exited_at=NOW), make_rank(1))
    waiting = decide(builder, broken)
    assert waiting.status.attempt == 1 and waiting.requeue_after == pytest.approx(5.0)
    decision = decide(builder, broken, NOW + 5.0)
    assert decision.status.attempt == 2
    assert only_failure(decision).message.endswith("; not ended: rank 1"), "the suspect is named"


def test_a_symptom_that_every_rank_shows_has_no_hidden_cause() -> None:
    decision = decide(make_job().running(), gang_with(make_rank(0, 75, exited_at=NOW), make_rank(1, 75)))
    assert decision.status.attempt == 2
    assert "not ended" not in only_failure(decision).message


def test_the_cause_that_is_reported_late_is_the_one_that_counts() -> None:
    builder = make_job().running()
    assert decide(builder, gang_with(make_rank(0, 75, exited_at=NOW), make_rank(1))).status.attempt == 1
    late = gang_with(make_rank(0, 75, exited_at=NOW), make_rank(1, oom_killed=True, signal=9, exited_at=NOW + 3))
    failure = only_failure(decide(builder, late, NOW + 3))
    assert (failure.failure_class, failure.rank) == (FailureClass.OUT_OF_MEMORY, 1)


def test_a_deleted_worker_explains_the_lost_peers() -> None:
    gang = gang_with(make_rank(0, 75), make_rank(1))
    decision = decide(make_job().running(), [gang[0]])
    failure = only_failure(decision)
    assert (failure.failure_class, failure.worker) == (FailureClass.DISRUPTION, 1)
    assert decision.status.restarts.since_progress == {} and decision.status.restarts.by_class == {"Disruption": 1}


def test_a_crash_that_follows_from_a_gone_worker_burns_no_budget() -> None:
    decision = decide(make_job().running(), gang_with(make_rank(0, 1), make_rank(1))[:1])
    assert only_failure(decision).failure_class is FailureClass.DISRUPTION


@pytest.mark.parametrize(
    ("change", "expected", "text"),
    [
        pytest.param({"phase": "Failed", "exit_code": 137}, FailureClass.CRASH, "exit code 137", id="agent killed"),
        pytest.param(
            {"phase": "Failed", "oom_killed": True}, FailureClass.OUT_OF_MEMORY, "out of memory", id="pod OOM"
        ),
        pytest.param(
            {"phase": "Failed", "disruption": "EvictionByEvictionAPI"},
            FailureClass.DISRUPTION,
            "EvictionByEvictionAPI",
            id="evicted",
        ),
        pytest.param({"phase": "Succeeded", "exit_code": 0}, FailureClass.DISRUPTION, "left before", id="left"),
        pytest.param({"deleting": True}, FailureClass.DISRUPTION, "is being deleted", id="being deleted"),
    ],
)
def test_a_broken_worker_is_replaced_under_a_new_name(
    change: dict[str, Any], expected: FailureClass, text: str
) -> None:
    gang = make_gang()
    decision = decide(make_job().running(), [gang[0], replace(gang[1], **change)])
    failure = only_failure(decision)
    assert (failure.failure_class, failure.action) == (expected, Action.REPLACE_WORKER)
    assert text in failure.message and failure.pod == "demo-w1-a1"
    assert [create.name for create in decision.create] == ["demo-w1-a2"]
    assert not decision.delete


def test_two_workers_lost_at_once_are_one_failure() -> None:
    decision = decide(make_job().with_workers(3).running(), make_gang(3)[:1])
    assert decision.status.attempt == 2 and len(decision.status.failures) == 1
    assert [create.name for create in decision.create] == ["demo-w1-a2", "demo-w2-a2"]


def test_a_worker_that_fails_while_the_gang_gathers_gets_a_new_name() -> None:
    builder = make_job()
    decide(builder, [])
    failed = make_worker(1, phase="Failed", exit_code=127)
    decision = decide(builder, [make_worker(0), failed])
    assert only_failure(decision).failure_class is FailureClass.STARTUP
    assert [create.name for create in decision.create] == ["demo-w1-a2"]


def test_only_the_newest_finished_worker_of_an_index_is_kept_for_its_logs() -> None:
    old = [make_worker(1, created_attempt=a, phase="Failed", exit_code=1) for a in (1, 2)]
    decision = decide(make_job().running(attempt=3), [make_gang()[0], *old, make_worker(1, 3, agent=make_agent(1, 3))])
    assert [delete.name for delete in decision.delete] == ["demo-w1-a1"]


def test_the_third_restart_without_progress_waits() -> None:
    builder = make_job().running(attempt=3, restarts={"total": 2, "sinceProgress": {"Crash": 2}})
    broken = gang_with(make_rank(0), make_rank(1, 1), attempt=3)
    decision = decide(builder, broken)
    assert (decision.status.attempt, decision.status.started_attempt) == (4, 3)
    assert decision.requeue_after == pytest.approx(2.0)
    assert decide(builder, broken, NOW + 2.0).status.started_attempt == 4


def test_the_cost_of_a_failure_is_filled_in_with_the_next_step() -> None:
    builder = make_job().running()
    gang = gang_with(make_rank(0), make_rank(1, signal=9))
    gang[0] = replace(gang[0], agent=make_agent(0, 1, progress=make_progress(step=17)))
    assert only_failure(decide(builder, gang)).step == 17
    resumed = make_gang(attempt=2)
    progress = make_progress(attempt=2, step=11, first_step=11, first_step_at=NOW + 0.79)
    resumed[0] = replace(resumed[0], agent=make_agent(0, 2, progress=progress))
    decision = decide(builder, resumed, NOW + 1)
    failure = only_failure(decision)
    assert (failure.lost_steps, failure.seconds_to_next_step) == (7, "0.80")
    assert decision.status.state is State.TRAINING
    assert [event.message for event in decision.events] == [
        "Training again 0.80 s after the failure, 7 steps repeated",
    ]


def test_the_agent_that_saw_every_step_knows_better_than_the_status_what_was_lost() -> None:
    builder = make_job().running()
    gang = gang_with(make_rank(0), make_rank(1, signal=9))
    gang[0] = replace(gang[0], agent=make_agent(0, 1, progress=make_progress(step=12)))
    assert only_failure(decide(builder, gang)).step == 12
    resumed = make_gang(attempt=2)
    progress = make_progress(attempt=2, step=11, first_step=11, first_step_at=NOW + 0.5)
    seen = progress.model_copy(update={"previous_step": 19})
    resumed[0] = replace(resumed[0], agent=make_agent(0, 2, progress=seen))
    assert only_failure(decide(builder, resumed, NOW + 1)).lost_steps == 9


def test_the_list_of_failures_keeps_the_newest_and_the_total_counts_all() -> None:
    entry = {"at": to_timestamp(NOW), "message": "x", "failure_class": "Crash", "action": "RestartRanks"}
    earlier = [{**entry, "attempt": n} for n in range(1, 17)]
    builder = make_job().running(attempt=17, failures=earlier, restarts={"total": 16})
    status = decide(builder, gang_with(make_rank(0), make_rank(1, 1), attempt=17)).status
    assert [failure.attempt for failure in status.failures] == list(range(2, 18))
    assert status.restarts.total == 17


def test_a_message_of_any_length_fits_the_status() -> None:
    decision = decide(make_job().running(), gang_with(make_rank(0), make_rank(1, 1, message="y" * 4000)))
    assert len(only_failure(decision).message) == 1024
    LLMTrainJobStatus.model_validate(decision.status.to_wire())


def test_a_worker_on_another_node_begins_with_a_clean_record() -> None:
    used = {"total": 2, "sinceProgress": {"Crash": 2}, "byWorkerSinceProgress": {"0": 1, "1": 2}}
    decision = decide(make_job().running(restarts=used), gang_with(make_rank(0), make_rank(1, 1)))
    assert decision.status.failures[-1].action is Action.REPLACE_NODE
    assert decision.status.restarts.by_worker_since_progress == {"0": 1}
    assert [create.avoid_nodes for create in decision.create] == [("node-1",)]


def test_a_late_report_of_an_attempt_that_is_over_does_not_move_the_progress() -> None:
    builder = make_job().running()
    gang = gang_with(make_rank(0), make_rank(1, signal=9))
    gang[0] = replace(gang[0], agent=make_agent(0, 1, progress=make_progress(step=17)))
    decide(builder, gang)
    gang[0] = replace(gang[0], agent=make_agent(0, 1, progress=make_progress(step=18)))
    status = decide(builder, gang, NOW + 60).status
    assert status.progress and status.progress.step == 17
