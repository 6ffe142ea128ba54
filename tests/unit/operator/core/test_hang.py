"""From heartbeats to the rank that hangs: whom the verdict names, and when there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain_api.constants import Action, ConditionType, FailureClass
from llmtrain_api.sync_beat import PHASES, STEP_PHASES, Beat
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.observed import Worker
from llmtrain_operator.core.plan import plan
from tests.support.jobs import NOW, JobBuilder, decide, make_agent, make_job, make_observed, make_progress, make_worker

WAITS = 'File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce'
COMPUTES = 'File "/v/trainer/llmtrain_trainer/model/block.py", line 7 in forward'


def beat(phase: str = "sync_wait", step: int = 57, seconds: float = 14.0, **fields: Any) -> Beat:
    """Return the beat of a rank that is overdue and was asked for its stack."""
    fields = {"limit_seconds": 11.0, "probed": True, "process_state": "S", "stack": WAITS, **fields}
    return Beat(global_rank=fields.pop("global_rank", 0), phase=phase, step=step, seconds=seconds, **fields)


def gang(*beats: Beat, **agent: Any) -> list[Worker]:
    """One worker with one rank per beat; the ranks are numbered."""
    agent = {"reported_at": NOW - 1, "progress": make_progress(step=56), **agent}
    return [
        make_worker(
            i,
            replicas=len(beats),
            agent=make_agent(i, 1, beats=(b.model_copy(update={"global_rank": i}),), **agent),
        )
        for i, b in enumerate(beats)
    ]


def job(workers: int) -> JobBuilder:
    return make_job().with_workers(workers).running()


def verdicts(decision: Plan) -> list[tuple[str, int | None]]:
    return [(f.failure_class.value, f.rank) for f in decision.status.failures]


def probed(decision: Plan) -> bool:
    """Orders to wait carry no question: they are for a gang of which too little is known."""
    return all(order.probe for order in decision.orders.values() if order.kind == "run")


STOPPED = beat("forward", process_state="T", stack="")
STUCK = beat("forward", stack=COMPUTES)
WAITER = beat()
FINE = beat("checkpoint", 56, 100.0, limit_seconds=120.0, stack=COMPUTES)


@pytest.mark.parametrize(
    ("beats", "rank"),
    [
        pytest.param([WAITER, STUCK, WAITER], 1, id="one is left in an earlier part of the step"),
        pytest.param([WAITER, WAITER, STOPPED], 2, id="one is stopped"),
        pytest.param([beat("data_loading"), STOPPED], 1, id="a stopped one, although another is further behind"),
        pytest.param([beat("forward"), STUCK], 1, id="of two at one place the one that is in no collective"),
        pytest.param([beat("forward", 58), beat("checkpoint", 57)], 1, id="one is left in the step before"),
        pytest.param([beat("rendezvous", 0), beat("config", 0)], 1, id="one is left in an earlier phase of the start"),
    ],
)
def test_rank_that_is_behind_is_the_culprit(beats: list[Beat], rank: int) -> None:
    decision = decide(job(len(beats)), gang(*beats))
    assert verdicts(decision) == [("Hang", rank)]
    assert decision.status.failures[0].action is Action.RESTART_RANKS
    assert decision.status.attempt == 2
    assert all(order.grace_seconds == 0 for order in decision.orders.values()), "SIGTERM does not end a stopped rank"


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(gang(WAITER, FINE), id="another is still writing a checkpoint, within its limit"),
        pytest.param(gang(WAITER, beat("forward", limit_seconds=None)), id="nothing is known of the one behind"),
        pytest.param(gang(WAITER, beat("forward", probed=False)), id="one has not been asked for its stack yet"),
        pytest.param(gang(WAITER, STUCK, reported_at=NOW - 6), id="reports are old"),
        pytest.param(gang(beat("forward"), beat("forward", seconds=1.0)), id="another came to the same place just now"),
        pytest.param(gang(WAITER, beat("forward", seconds=1.0, process_state="T")), id="one was stopped just now"),
        pytest.param([gang(STUCK, WAITER)[0], make_worker(1)], id="a worker has not come back to a new operator"),
    ],
)
def test_suspicion_without_proof_asks_all_ranks_and_waits(workers: list[Worker]) -> None:
    decision = decide(job(2), workers)
    assert verdicts(decision) == []
    assert decision.requeue_after is not None and decision.requeue_after <= 1.0
    condition = decision.status.condition(ConditionType.HANGING)
    assert condition and condition.status == "True"
    assert probed(decision)


def test_no_overdue_beat_is_no_suspicion() -> None:
    decision = decide(job(2), gang(FINE, beat(seconds=2.0)))
    assert not any(order.probe for order in decision.orders.values())
    assert decision.status.condition(ConditionType.HANGING) is None


def test_beats_of_an_older_attempt_are_history() -> None:
    builder = make_job().with_workers(2).running(attempt=2)
    decision = decide(builder, gang(STUCK, WAITER))
    assert verdicts(decision) == [] and not any(order.probe for order in decision.orders.values())


def test_message_names_rank_worker_node_phase_and_what_others_wait_in() -> None:
    failure = decide(job(3), gang(WAITER, STOPPED, WAITER)).status.failures[0]
    assert failure.message == (
        "rank 1 on worker 1 (node-1) hangs in forward of step 57 for 14 s (process stopped); 2 other ranks in "
        "sync_wait: torch/distributed/distributed_c10d.py line 2810 in all_reduce"
    )
    assert (failure.worker, failure.node, failure.failure_class) == (1, "node-1", FailureClass.HANG)


def test_condition_names_the_culprit_until_the_next_step() -> None:
    builder = job(2)
    first = decide(builder, gang(WAITER, beat("forward", probed=False)))
    assert [e.reason for e in first.events] == ["Hanging"]
    decide(builder, gang(WAITER, STUCK))
    silent = gang(WAITER, STUCK)
    between = decide(builder, silent).status.condition(ConditionType.HANGING)
    assert between and between.status == "True" and "rank 1 on worker 1" in between.message
    stepping = [
        replace(w, agent=make_agent(w.index, 2, progress=make_progress(2, 58), reported_at=NOW)) for w in silent
    ]
    decide(builder, stepping)
    after = decide(builder, stepping).status.condition(ConditionType.HANGING)
    assert after and (after.status, after.reason) == ("False", "Stepping")


beats = st.builds(
    beat,
    phase=st.sampled_from(PHASES),
    step=st.integers(1, 3),
    seconds=st.floats(0, 100),
    limit_seconds=st.one_of(st.none(), st.floats(0, 100)),
    probed=st.booleans(),
    process_state=st.sampled_from(["S", "R", "D", "T", ""]),
    stack=st.sampled_from(["", WAITS, COMPUTES]),
)


@given(st.lists(beats, min_size=1, max_size=5))
def test_culprit_is_always_overdue_itself(found: list[Beat]) -> None:
    decision = plan(make_observed(job(len(found)), gang(*found)))
    for name, rank in verdicts(decision):
        assert name == "Hang" and rank is not None
        assert found[rank].overdue and all(b.probed for b in found)
    assert decision.requeue_after is not None or not any(b.overdue for b in found)


@given(
    st.lists(st.tuples(st.sampled_from(STEP_PHASES), st.integers(58, 60), st.floats(12, 200)), max_size=4),
    st.floats(0, 119),
)
def test_slow_checkpoint_gives_no_verdict_however_long_others_wait(
    waiting: list[tuple[str, int, float]], seconds: float
) -> None:
    slow = beat("checkpoint", 57, seconds, limit_seconds=120.0, stack=COMPUTES)
    others = [beat(phase, step, long) for phase, step, long in waiting]
    decision = plan(make_observed(job(len(others) + 1), gang(*others, slow)))
    assert verdicts(decision) == []
