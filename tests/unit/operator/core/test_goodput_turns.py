"""Single looks of the ledger: what turns time from one part to another, and what was held meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmtrain_api.constants import Action, FailureClass, GoodputPart, State
from llmtrain_api.status import FailureStatus, LLMTrainJobStatus
from llmtrain_api.status_goodput import GoodputMark, GoodputParts, GoodputStatus
from llmtrain_operator.core.changes import worth_writing
from llmtrain_operator.core.goodput import with_ledger
from llmtrain_operator.core.held import integral
from llmtrain_operator.core.observed import Observed, Policy
from llmtrain_operator.core.times import to_timestamp
from tests.support.cluster_sim import TICK, ClusterSim
from tests.support.jobs import NOW, make_agent, make_gang, make_job, make_observed, make_progress, make_worker
from tests.support.sim_faults import FAULTS

BEGIN = NOW - 100.0
MARK = GoodputMark(step=10, compute_milliseconds=40_000)


def seen(part: GoodputPart, report: dict[str, Any] | None, count: int = 0, **ledger: Any) -> Observed:
    """Return a job whose ledger reaches to 100 s ago, with what rank 0 reports now."""
    before = {
        "accounted_until": to_timestamp(BEGIN),
        "milliseconds": GoodputParts(compute=50_000),
        "part": part,
        "attempt": 1,
        "marks": [MARK],
    }
    status = LLMTrainJobStatus(
        state=State.TRAINING, attempt=2, started_attempt=2, goodput=GoodputStatus(**{**before, **ledger})
    )
    builder = make_job().with_status(status).with_metadata(creationTimestamp=to_timestamp(BEGIN - 50))
    builder.with_spec(workers={"accelerator": {"count": count}})
    workers = make_gang(attempt=2)
    if report:
        agent = make_agent(0, 2, progress=make_progress(**{"attempt": 2, **report}), last_seen=NOW - 20)
        workers[0] = make_worker(0, agent=agent)
    return make_observed(builder, workers)


def booked(observed: Observed, **status: Any) -> dict[str, float]:
    """Return the seconds that the look put into each part, and took from it."""
    old = observed.job.status
    ledger = with_ledger(observed, old.model_copy(update=status)).goodput
    assert ledger and old.goodput
    after, before = ledger.milliseconds.to_wire(), old.goodput.milliseconds.to_wire()
    return {part: (after[part] - before[part]) / 1000 for part in after if after[part] != before[part]}


def failure(kind: FailureClass, at: float) -> list[FailureStatus]:
    entry = FailureStatus(
        at=to_timestamp(at), attempt=2, failure_class=kind, pod="demo-w0-a1", message="m", action=Action.REPLACE_NODE
    )
    return [entry]


def test_a_first_step_counts_from_its_end_though_it_is_told_late() -> None:
    report = {"step": 14, "first_step": 11, "first_step_at": NOW - 30, "step_at": NOW}
    observed = seen(GoodputPart.RESTART, report)
    assert booked(observed) == {"restart": 70.0, "compute": 20.0, "redone": 10.0}
    ledger = with_ledger(observed, observed.job.status).goodput
    assert ledger and [(mark.step, mark.compute_milliseconds) for mark in ledger.marks] == [
        (10, 40_000),
        (11, 40_000),
        (14, 70_000),
    ]


def test_steps_beyond_an_older_checkpoint_are_redone_and_forgotten() -> None:
    report = {"step": 6, "first_step": 6, "first_step_at": NOW, "step_at": NOW}
    observed = seen(GoodputPart.RESTART, report)
    assert booked(observed) == {"restart": 100.0, "compute": -30.0, "redone": 30.0}
    ledger = with_ledger(observed, observed.job.status).goodput
    assert ledger and [(mark.step, mark.compute_milliseconds) for mark in ledger.marks] == [(5, 20_000), (6, 20_000)]


STEPPING = {"step": 20, "first_step": 11, "first_step_at": BEGIN - 45, "step_at": NOW - 60}


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        pytest.param({}, {"compute": 100.0}, id="nothing"),
        pytest.param({"state": State.SUSPENDED}, {"compute": 100.0}, id="suspended now"),
        pytest.param({"state": State.SUCCEEDED}, {"compute": 40.0, "checkpointStall": 60.0}, id="the end"),
        pytest.param(
            {"failures": failure(FailureClass.CRASH, NOW - 50)},
            {"compute": 40.0, "redone": 10.0, "restart": 50.0},
            id="a crash",
        ),
        pytest.param(
            {"failures": failure(FailureClass.NODE_LOST, NOW)},
            {"compute": 40.0, "redone": 40.0, "restart": 20.0},
            id="a node last heard of 20 s ago",
        ),
        pytest.param({"failures": failure(FailureClass.HANG, NOW)}, {"compute": 40.0, "hang": 60.0}, id="a hang"),
    ],
)
def test_an_end_of_steps_is_booked_from_the_last_step(status: dict[str, Any], parts: dict[str, float]) -> None:
    assert booked(seen(GoodputPart.COMPUTE, STEPPING, attempt=2), **status) == parts


def test_what_was_taken_for_compute_is_given_back_to_the_last_known_step_and_no_further() -> None:
    hang = {"failures": failure(FailureClass.HANG, NOW)}
    observed = seen(GoodputPart.COMPUTE, {**STEPPING, "step": 10, "step_at": BEGIN - 4}, attempt=2)
    assert booked(observed, **hang) == {"compute": -4.0, "hang": 104.0}
    wrong_clock = seen(GoodputPart.COMPUTE, {**STEPPING, "step": 10, "step_at": BEGIN - 4000}, attempt=2)
    assert booked(wrong_clock, **hang) == {"compute": -10.0, "hang": 110.0}


def test_accelerator_time_is_given_back_with_the_time() -> None:
    held = {"accelerators_held": 16, "accelerator_milliseconds": GoodputParts(compute=800_000)}
    observed = seen(GoodputPart.COMPUTE, {**STEPPING, "step": 10, "step_at": BEGIN - 4}, count=8, attempt=2, **held)
    status = observed.job.status.model_copy(update={"failures": failure(FailureClass.HANG, NOW)})
    ledger = with_ledger(observed, status).goodput
    assert ledger and ledger.accelerator_milliseconds == GoodputParts(compute=736_000, hang=104_000 * 16)


@pytest.mark.parametrize(("price", "cost"), [(0.0, ""), (2.5, "1.25"), (1e300, "999999999999.99")])
def test_hours_cost_what_the_operators_setting_says(price: float, cost: str) -> None:
    held = {"accelerators_held": 0, "accelerator_milliseconds": GoodputParts(compute=1_800_000)}
    observed = seen(GoodputPart.COMPUTE, STEPPING, attempt=2, **held)
    observed = replace(observed, policy=Policy(accelerator_hour_price=price))
    ledger = with_ledger(observed, observed.job.status).goodput
    assert ledger and ledger.cost == cost


def test_waits_for_checkpoints_are_told_once() -> None:
    report = {**STEPPING, "step_at": NOW, "checkpoint_stall_seconds": 9.0}
    observed = seen(GoodputPart.COMPUTE, report, attempt=2, attempt_checkpoint_stall_milliseconds=2000)
    assert booked(observed) == {"compute": 93.0, "checkpointStall": 7.0}


def test_scheduling_ends_when_the_last_worker_has_its_node() -> None:
    observed = seen(GoodputPart.SCHEDULING, None)
    gang = [make_worker(i, placed_at=at) for i, at in enumerate((NOW - 90, NOW - 70))]
    assert booked(make_observed(observed.job, gang), state=State.PENDING) == {"scheduling": 30.0, "start": 70.0}
    gang[1] = make_worker(1, node="", phase="Pending")
    assert booked(make_observed(observed.job, gang), state=State.PENDING) == {"scheduling": 100.0}


def test_accelerators_count_from_when_their_worker_has_its_node() -> None:
    observed = seen(GoodputPart.SCHEDULING, None, count=8)
    gang = [make_worker(i, placed_at=at) for i, at in enumerate((NOW - 90, NOW - 70))]
    ledger = with_ledger(make_observed(observed.job, gang), observed.job.status).goodput
    assert ledger and ledger.accelerators_held == 16
    assert ledger.accelerator_milliseconds == GoodputParts(scheduling=20_000 * 8, start=70_000 * 16)
    assert ledger.accelerator_hours == "0.35"


@pytest.mark.parametrize(("start", "end", "total"), [(0, 10, 30), (-5, 10, 45), (12, 15, 24), (5, 25, 15 + 80 + 50)])
def test_what_was_held_is_added_up_between_any_two_moments(start: int, end: int, total: int) -> None:
    assert integral([(0, 3), (10, 8), (20, 10)], start, end) == total


@pytest.mark.parametrize(("held", "written"), [(16, False), (9, False), (8, True), (0, True)])
def test_a_gang_that_lost_half_of_what_it_held_is_written(held: int, written: bool) -> None:
    observed = seen(GoodputPart.SUSPENDED, None, accelerators_held=16)
    assert observed.job.status.goodput
    ledger = observed.job.status.goodput.model_copy(update={"accelerators_held": held})
    assert worth_writing(observed, observed.job.status.model_copy(update={"goodput": ledger})) is written


@pytest.mark.parametrize("fault", ["rank killed", "pod force-deleted", "job suspended"])
def test_accelerator_time_is_what_the_clusters_pods_held(fault: str) -> None:
    builder = make_job().with_workers(2, 2).with_spec(training={"steps": 200, "globalBatchSize": 24})
    builder.with_spec(workers={"accelerator": {"count": 8}}).with_metadata(creationTimestamp=to_timestamp(NOW))
    sim = ClusterSim(builder, seed=3, every_steps=40)
    held = 0.0
    for look in range(600):
        if look in (60, 160):
            FAULTS[fault](sim, 2)
        sim.tick()
        placed = [at for pod in sim.pods.values() if (at := pod.worker().placed_at) is not None]
        held += 8 * sum(min(TICK, sim.now - at) for at in placed)
        if sim.state is State.SUCCEEDED:
            break
    ledger = sim.status.goodput
    assert ledger and sim.state is State.SUCCEEDED
    told = ledger.accelerator_milliseconds.total() / 1000
    assert told == pytest.approx(held, abs=3 * TICK * 16)
    assert ledger.accelerator_milliseconds.compute == ledger.milliseconds.compute * 16
