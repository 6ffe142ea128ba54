"""From the ranks' own times to the slow one: whom the condition names, and when its worker is replaced."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain_api.constants import Action, ConditionType
from llmtrain_api.status import Condition, LLMTrainJobStatus
from llmtrain_api.sync_beat import Beat, Own
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.observed import Worker
from llmtrain_operator.core.straggler import REPLACE_AGAIN_SECONDS
from llmtrain_operator.core.times import to_timestamp
from tests.support.jobs import NOW, JobBuilder, decide, make_agent, make_job, make_progress, make_worker


def own(compute: float = 0.5, **fields: Any) -> Own:
    values = {"loading_seconds": 0.01, "step_seconds": 1.0, "span_seconds": 30.0, "compute_seconds": compute}
    return Own(**{**values, **fields})


def gang(*owns: Own | None, age: float = 1.0) -> list[Worker]:
    """One worker with one rank per own time."""
    workers = []
    for index, told in enumerate(owns):
        beat = Beat(global_rank=index, phase="forward", step=5, seconds=0.1, own=told)
        agent = make_agent(index, 1, beats=(beat,), reported_at=NOW - age, progress=make_progress(step=56))
        workers.append(make_worker(index, replicas=len(owns), agent=agent))
    return workers


def job(workers: int, status: LLMTrainJobStatus | None = None, **policy: Any) -> JobBuilder:
    builder = make_job().with_workers(workers).running()
    if status:
        builder = builder.with_status(status)
    return builder.with_spec(failurePolicy={"straggler": policy}) if policy else builder


def straggling(decision: Plan) -> Condition | None:
    return decision.status.condition(ConditionType.STRAGGLING)


def named(decision: Plan) -> str:
    """Return the rank that the condition names; empty where it does not hold."""
    condition = straggling(decision)
    return condition.message.split(" on ")[0] if condition and condition.status == "True" else ""


SLOW = own(0.8)


@pytest.mark.parametrize(
    ("owns", "name"),
    [
        pytest.param([own(), SLOW, own()], "rank 1", id="one of three"),
        pytest.param([SLOW, own()], "rank 0", id="one of two"),
        pytest.param([own(), own(), SLOW, own(0.9)], "rank 3", id="of two slow ones the slower"),
        pytest.param([own(), own(0.7)], "", id="less than half as much more"),
        pytest.param([own(0.1), own(0.1)], "", id="all alike"),
        pytest.param([own(0.01), own(0.05)], "", id="much slower, in a small part of the step"),
        pytest.param([own(), own(loading_seconds=0.4)], "rank 1", id="slow in loading data"),
        pytest.param([own(0, device_seconds=0.002), own(0, device_seconds=0.004)], "rank 1", id="a slow device"),
        pytest.param([own(stage=0), own(2.0, stage=1)], "", id="another stage has other work"),
        pytest.param([own(stage=0), own(stage=0), own(2.0, stage=1), own(3.2, stage=1)], "rank 3", id="in its stage"),
        pytest.param([own(), SLOW.model_copy(update={"span_seconds": 10.0})], "", id="seen for too short a time"),
        pytest.param([own(), SLOW, None], "", id="one has told nothing yet"),
    ],
)
def test_the_rank_that_is_slower_than_its_peers_is_named(owns: list[Own | None], name: str) -> None:
    decision = decide(job(len(owns)), gang(*owns))
    assert named(decision) == name
    assert not decision.status.failures and decision.status.attempt == 1, "the default only tells"


def test_the_message_says_who_where_how_slow_and_what_it_costs() -> None:
    condition = straggling(decide(job(3), gang(own(), own(), own(1.1, step_seconds=1.2))))
    assert condition and condition.reason == "RankSlow"
    assert condition.message == (
        "rank 2 on worker 2 (node-2) takes 2.2 times as long as the median of its 2 peers for compute: 1.10 s instead "
        "of 500.0 ms, with steps of 1.20 s"
    )


def test_old_reports_say_nothing() -> None:
    assert straggling(decide(job(2), gang(own(), SLOW, age=20.0))) is None


def test_it_is_told_once_and_holds_until_the_rank_is_nearly_as_fast_as_the_others() -> None:
    first = decide(job(2), gang(own(), SLOW))
    assert [event.reason for event in first.events] == ["Straggling"]
    again = decide(job(2, first.status), gang(own(), own(0.9)))
    assert straggling(again) == straggling(first) and not again.events, "figures that change are no news"
    assert not again.status_changed
    better = decide(job(2, first.status), gang(own(), own(0.68)))
    assert named(better) == "rank 1", "36 % is less than the 50 % that begin it, and more than the 25 % that end it"
    gone = decide(job(2, first.status), gang(own(), own(0.55)))
    assert named(gone) == "" and [event.reason for event in gone.events] == ["StragglerGone"]
    other = decide(job(2, first.status), gang(SLOW, own()))
    assert named(other) == "rank 0" and [event.reason for event in other.events] == ["Straggling"]
    unknown = decide(job(2, first.status), gang(own(), None))
    assert named(unknown) == "rank 1", "nothing is known, so nothing changes"


REPLACE = {"action": "ReplaceNode"}


def test_its_worker_is_replaced_after_a_checkpoint_where_the_user_wants_that() -> None:
    decision = decide(job(3, **REPLACE), gang(own(), SLOW, own()))
    [failure] = decision.status.failures
    assert (failure.failure_class.value, failure.worker, failure.rank) == ("Hardware", 1, 1)
    assert failure.action is Action.REPLACE_NODE
    assert decision.status.attempt == 2
    assert {order.grace_seconds for order in decision.orders.values()} == {60.0}, "time for a checkpoint"
    [delete] = decision.delete
    assert (delete.name, delete.grace_seconds) == ("demo-w1-a1", None), "its ranks write their part of it first"


def test_it_is_replaced_once_an_hour_and_never_makes_a_job_fail() -> None:
    workers = gang(own(), SLOW)
    failed = decide(job(2, **REPLACE), workers).status.failures
    for age, replaced in ((REPLACE_AGAIN_SECONDS - 60, False), (REPLACE_AGAIN_SECONDS + 60, True)):
        past = [
            failure.model_copy(update={"at": to_timestamp(NOW - age), "pod": ""}).model_dump() for failure in failed
        ]
        decision = decide(job(2, **REPLACE).with_status(failures=past), workers)
        assert (decision.status.attempt == 2) is replaced
    spent = make_job().with_workers(2).running()
    spent.with_spec(failurePolicy={"straggler": REPLACE, "budgets": {"hardware": 0}})
    decision = decide(spent, workers)
    assert decision.status.attempt == 1 and named(decision) == "rank 1"


def test_it_does_not_hide_a_failure() -> None:
    workers = gang(own(), SLOW)
    dead = [*workers[:1], make_worker(1, phase="Failed", exit_code=1)]
    assert [f.failure_class.value for f in decide(job(2, **REPLACE), dead).status.failures] == ["Crash"]


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=9))
def test_never_more_than_half_of_the_ranks_are_slow(computes: list[float]) -> None:
    """The one that is named is at least half as slow again as most of its peers, and the fastest rank never is."""
    name = named(decide(job(len(computes)), gang(*(own(c, step_seconds=max(computes)) for c in computes))))
    if name:
        slow = computes[int(name.removeprefix("rank "))]
        others = [c for c in computes if c is not slow]
        assert slow == max(computes)
        assert sum(slow > 1.5 * c for c in others) * 2 >= len(others)
