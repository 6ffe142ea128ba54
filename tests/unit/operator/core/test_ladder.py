"""Rungs, the user's own rules, broken hardware, and the same error again and again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from llmtrain_api.constants import Action, FailureClass, State
from llmtrain_api.spec_failure import ClassName, RuleAction
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.ladder import LADDERS, RUNGS
from llmtrain_operator.core.observed import Worker
from tests.support.jobs import NOW, JobBuilder, decide, make_agent, make_gang, make_job, make_progress, make_rank


def ruled(*rules: dict[str, Any], **budgets: int) -> JobBuilder:
    return make_job().with_spec(failurePolicy={"rules": list(rules), "budgets": budgets}).running()


def broken(builder: JobBuilder, now: float = NOW, **rank: Any) -> Plan:
    """Have the gang started, if it is not yet, and decide about it once rank 1, on worker 1, has ended as told."""
    status = builder.build().status
    attempt = status.attempt
    if status.started_attempt < attempt:
        decide(builder, make_gang(attempt=0, created_attempt=attempt, last_seen=now - 1), now - 1)
    ranks = [make_rank(0), make_rank(1, **{"exited_at": now, **rank})]
    agents = [make_agent(i, attempt, [ranks[i]], last_seen=now) for i in range(2)]
    gang = make_gang(created_attempt=attempt)
    return decide(builder, [replace(w, agent=a) for w, a in zip(gang, agents, strict=True)], now)


def test_every_class_has_a_ladder_that_only_rises() -> None:
    assert set(LADDERS) == set(FailureClass)
    for ladder in LADDERS.values():
        assert list(ladder) == sorted(ladder, key=RUNGS.index)


def test_a_worker_that_fails_again_and_again_takes_one_rung_after_the_other() -> None:
    actions = []
    for before in range(4):
        used = {"sinceProgress": {"Hang": 1}, "byWorkerSinceProgress": {"1": before}}
        builder = make_job().running(restarts=used)
        actions.append(broken(builder, exit_code=77).status.failures[-1].action)
    assert actions == [Action.RESTART_RANKS, Action.REPLACE_WORKER, Action.REPLACE_NODE, Action.REPLACE_NODE]


def test_lost_peers_without_a_culprit_end_in_all_workers_being_placed_anew() -> None:
    builder = make_job().running(restarts={"sinceProgress": {"Communication": 2}})
    gang = [
        replace(worker, agent=make_agent(i, 1, [make_rank(i, exit_code=75)])) for i, worker in enumerate(make_gang())
    ]
    decision = decide(builder, gang)
    assert decision.status.failures[0].action is Action.REQUEUE
    assert [delete.name for delete in decision.delete] == ["demo-w0-a1", "demo-w1-a1"]
    assert [create.name for create in decision.create] == ["demo-w0-a2", "demo-w1-a2"]
    assert decide(builder, [], NOW + 1).create == decision.create, "the same after a restart of the operator"


# --- the user's rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "rank", "action"),
    [
        pytest.param({"onExitCodes": [42], "action": "FailJob"}, {"exit_code": 42}, Action.FAIL_JOB, id="exit code"),
        pytest.param({"onExitCodes": [137], "action": "ReplaceNode"}, {"signal": 9}, Action.REPLACE_NODE, id="signal"),
        pytest.param({"onExitCodes": [42], "action": "FailJob"}, {"exit_code": 43}, Action.RESTART_RANKS, id="other"),
        pytest.param(
            {"onClasses": ["UserError"], "action": "RestartRanks"},
            {"exit_code": 64},
            Action.RESTART_RANKS,
            id="a user error that the user wants tried again",
        ),
        pytest.param(
            {"messageContains": "cuda ERROR", "action": "ReplaceNode"},
            {"exit_code": 1, "message": "RuntimeError: CUDA error: an illegal memory access"},
            Action.REPLACE_NODE,
            id="message, whatever its case",
        ),
        pytest.param({"onWorkers": [1], "action": "Requeue"}, {"exit_code": 1}, Action.REQUEUE, id="worker"),
        pytest.param({"onWorkers": [0], "action": "Requeue"}, {"exit_code": 1}, Action.RESTART_RANKS, id="not worker"),
        pytest.param({"action": "ReplaceWorker"}, {"exit_code": 1}, Action.REPLACE_WORKER, id="all failures"),
        pytest.param(
            {"onExitCodes": [1], "onWorkers": [0], "action": "FailJob"},
            {"exit_code": 1},
            Action.RESTART_RANKS,
            id="all conditions must hold",
        ),
    ],
)
def test_a_rule_of_the_user_decides_before_the_ladder(
    rule: dict[str, Any], rank: dict[str, Any], action: Action
) -> None:
    failure = broken(ruled(rule), **rank).status.failures[-1]
    matched = action is not Action.RESTART_RANKS or rule["action"] == "RestartRanks"
    assert (failure.action, failure.rule) == (action, "spec.failurePolicy.rules[0]" if matched else "")


def test_a_rule_can_name_every_class_and_every_action() -> None:
    assert get_args(ClassName) == tuple(kind.value for kind in FailureClass)
    assert set(get_args(RuleAction)) == {action.value for action in Action} | {"Ignore"}


def test_the_first_rule_that_matches_decides() -> None:
    builder = ruled({"onExitCodes": [2], "action": "FailJob"}, {"action": "Requeue"}, {"action": "FailJob"})
    assert broken(builder, exit_code=1).status.failures[-1].rule == "spec.failurePolicy.rules[1]"


def test_what_is_ignored_costs_no_budget() -> None:
    builder = ruled({"onExitCodes": [9], "action": "Ignore"}, crash=0)
    for count in range(1, 9):
        status = broken(builder, NOW + 100 * count, exit_code=9, message=f"try {count}").status
        assert status.state is State.RESTARTING
        assert (status.restarts.total, status.restarts.since_progress) == (count, {})


def test_a_budget_holds_for_a_rule_too() -> None:
    builder = ruled({"onExitCodes": [1], "action": "ReplaceWorker"}, crash=0)
    assert broken(builder, exit_code=1).status.state is State.FAILED


def test_less_than_can_work_is_not_done() -> None:
    builder = ruled({"action": "RestartRanks"})
    gang = make_gang()
    gone = [gang[0], replace(gang[1], phase="Failed", exit_code=137)]
    failure = decide(builder, gone).status.failures[0]
    assert (failure.action, failure.rule) == (Action.REPLACE_WORKER, "spec.failurePolicy.rules[0]")


# --- the same again --------------------------------------------------------------------------------------------------


def _three_times(**rank: Any) -> list[State | None]:
    builder = make_job().with_budgets(crash=50).running()
    return [broken(builder, NOW + 1000 * count, **rank).status.state for count in range(3)]


def test_the_same_error_of_the_same_rank_at_the_same_step_stops_the_job_the_third_time() -> None:
    assert _three_times(exit_code=1, message="IndexError: 7") == [State.RESTARTING, State.RESTARTING, State.FAILED]
    builder = make_job().with_budgets(crash=50).running()
    for count in range(3):
        status = broken(builder, NOW + 1000 * count, exit_code=1, message="IndexError: 7").status
    assert "3 times in a row by the same rank before the first step" in status.message
    assert status.restarts.total == 2


@pytest.mark.parametrize(
    "rank", [{"signal": 9}, {"signal": 15}, {"exit_code": 75}], ids=["SIGKILL", "SIGTERM", "a lost peer"]
)
def test_what_comes_from_outside_may_repeat(rank: dict[str, Any]) -> None:
    assert State.FAILED not in _three_times(**rank)


def test_the_same_error_at_another_step_is_another_error() -> None:
    builder = make_job().with_budgets(crash=50).running()
    for count in range(4):
        attempt, now = builder.build().status.attempt, NOW + 1000 * count
        gang = make_gang()
        progress = make_progress(attempt=attempt, step=5 + count)
        ranks = [make_rank(0)], [make_rank(1, exit_code=1, exited_at=now)]
        agents = [make_agent(i, attempt, ranks[i], last_seen=now, progress=None if i else progress) for i in range(2)]
        status = decide(builder, [replace(w, agent=a) for w, a in zip(gang, agents, strict=True)], now).status
    assert status.state is not State.FAILED


# --- hardware --------------------------------------------------------------------------------------------------------


def _with_bad_gpu(ranks: dict[str, Any], **fields: Any) -> list[Worker]:
    gang = make_gang()
    return [gang[0], replace(gang[1], agent=make_agent(1, 1, [make_rank(1, **ranks)]), **fields)]


def test_a_crash_on_a_node_that_reports_a_broken_device_leaves_the_node() -> None:
    gang = _with_bad_gpu({"signal": 11}, hardware="GpuXidError: Xid 79 on GPU 3")
    failure = decide(make_job().running(), gang).status.failures[0]
    assert (failure.failure_class, failure.action) == (FailureClass.HARDWARE, Action.REPLACE_NODE)
    assert failure.message.endswith("node node-1: GpuXidError: Xid 79 on GPU 3")


def test_a_complaint_of_a_node_alone_stops_nobody() -> None:
    gang = _with_bad_gpu({}, hardware="GpuThermalWatch: throttled")
    assert decide(make_job().running(), gang).status.attempt == 1


def test_a_users_error_stays_one_on_a_broken_node() -> None:
    gang = _with_bad_gpu({"exit_code": 64}, hardware="GpuXidError")
    assert decide(make_job().running(), gang).status.failures[0].failure_class is FailureClass.USER_ERROR


def test_a_device_that_its_plugin_calls_unhealthy_is_left_with_a_checkpoint() -> None:
    gang = _with_bad_gpu({}, broken_device="nvidia.com/gpu GPU-7 is unhealthy")
    decision = decide(make_job().running(), gang)
    failure = decision.status.failures[0]
    assert (failure.failure_class, failure.action) == (FailureClass.HARDWARE, Action.REPLACE_NODE)
    assert [create.avoid_nodes for create in decision.create] == [("node-1",)]
    assert {order.grace_seconds for order in decision.orders.values()} == {60.0}, "ranks may write a checkpoint"
    assert [delete.grace_seconds for delete in decision.delete] == [None], "those of the broken node too"
