"""Random faults against the simulated cluster: a job always ends, and ends well unless a budget says otherwise."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain_api.constants import Action, FailureClass, State
from tests.support.cluster_sim import ClusterSim
from tests.support.jobs import JobBuilder, make_job
from tests.support.sim_faults import FAULTS

LONG = 40_000.0
"""Virtual seconds in which every job of these tests must have ended, whatever happens to it."""
PLENTY = dict.fromkeys(("outOfMemory", "numerics", "checkpoint", "hang", "crash", "startup", "communication"), 10000)

faults = st.lists(
    st.tuples(st.floats(0.5, 30.0), st.sampled_from(sorted(FAULTS)), st.integers(0, 7)), min_size=1, max_size=8
)
scenario = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def job(replicas: int = 2, ranks: int = 2, steps: int = 40) -> JobBuilder:
    builder = make_job().with_workers(replicas, ranks).with_spec(training={"steps": steps, "globalBatchSize": 24})
    return builder.with_deadlines(stopSeconds=10, startSeconds=120, pendingSeconds=60)


def inflict(sim: ClusterSim, plan: list[tuple[float, str, int]]) -> None:
    for pause, fault, target in plan:
        sim.run(pause, until_end=False)
        FAULTS[fault](sim, target)


@scenario
@given(faults, st.integers(0, 2**16), st.integers(1, 3), st.integers(0, 2))
def test_with_enough_budget_every_job_succeeds(
    plan: list[tuple[float, str, int]], seed: int, replicas: int, cache_lag: int
) -> None:
    sim = ClusterSim(job(replicas).with_budgets(**PLENTY), seed=seed, cache_lag=cache_lag)
    inflict(sim, plan)
    sim.run(LONG)
    assert sim.state is State.SUCCEEDED, (sim.status.message, sim.recorded())
    assert sim.store.step == 40


@scenario
@given(faults, st.integers(0, 2**16))
def test_with_usual_budgets_a_job_ends_with_its_first_cause(plan: list[tuple[float, str, int]], seed: int) -> None:
    sim = ClusterSim(job(), seed=seed)
    inflict(sim, plan)
    sim.run(LONG)
    assert sim.state in (State.SUCCEEDED, State.FAILED)
    if sim.state is State.FAILED:
        last = sim.status.failures[-1]
        assert last.action is Action.FAIL_JOB
        assert last.failure_class is not FailureClass.DISRUPTION
        assert "spec.failurePolicy.budgets." in sim.status.message


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_each_fault_alone_is_survived_and_counted_at_most_once(fault: str) -> None:
    sim = ClusterSim(job(), seed=1)
    sim.run(15, until_end=False)
    assert sim.state is State.TRAINING
    FAULTS[fault](sim, 1)
    sim.run(LONG)
    assert sim.state is State.SUCCEEDED, sim.recorded()
    # A node that is cut off may first show as lost peers, in place, and then as the silent worker that it is.
    assert sim.restarts() <= (10 if fault == "node cut off" else 1), sim.recorded()


def test_hung_rank_is_named_and_restarted_in_place() -> None:
    sim = ClusterSim(job(), seed=1)
    sim.run(15, until_end=False)
    FAULTS["rank stopped"](sim, 2)
    sim.run(20, until_end=False)
    assert sim.recorded() == [("Hang", Action.RESTART_RANKS)]
    assert sim.status.failures[0].rank == 2
    sim.run(LONG)
    assert sim.state is State.SUCCEEDED


def test_rank_that_hangs_again_loses_its_worker() -> None:
    sim = ClusterSim(job(steps=400), seed=1, every_steps=10_000)
    for _ in range(2):
        sim.run(15, until_end=False)
        FAULTS["rank stopped"](sim, 2)
        sim.run(20, until_end=False)
    assert sim.recorded() == [("Hang", Action.RESTART_RANKS), ("Hang", Action.REPLACE_WORKER)]
