"""The ledger adds up whatever is seen, and says of simulated faults what the cluster's own record says."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain_api.constants import TERMINAL_STATES, GoodputPart, State
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.status_goodput import GoodputMark, GoodputParts, GoodputStatus
from llmtrain_operator.core import goodput
from llmtrain_operator.core.changes import differs
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.plan import plan
from llmtrain_operator.core.times import from_timestamp, to_timestamp
from tests.support.cluster_sim import TICK, ClusterSim
from tests.support.jobs import NOW, make_job
from tests.support.sim_faults import FAULTS
from tests.support.sim_worker import SimRank
from tests.unit.operator.core.observations import observations

thorough = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
amounts = st.integers(0, 10**6)


def milliseconds(text: str) -> int:
    at = from_timestamp(text)
    assert at is not None
    return round(at * 1000)


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[float, GoodputStatus]:
    """Return a creation time and a ledger of that age."""
    parts = GoodputParts(**{name: draw(amounts) for name in GoodputParts.model_fields})
    until = NOW - draw(st.sampled_from([0.0, 0.001, 30.0, 4000.0, -5.0]))
    steps = sorted(draw(st.sets(st.integers(0, 120), max_size=16)))
    times = sorted(draw(st.lists(st.integers(0, parts.compute), min_size=len(steps), max_size=len(steps))))
    return until - parts.total() / 1000, GoodputStatus(
        accounted_until=to_timestamp(until),
        milliseconds=parts,
        part=draw(st.sampled_from(GoodputPart)),
        attempt=draw(st.integers(0, 4)),
        attempt_checkpoint_stall_milliseconds=draw(amounts),
        marks=[GoodputMark(step=s, compute_milliseconds=c) for s, c in zip(steps, times, strict=True)],
    )


def aged(observed: Observed, created: float, ledger: GoodputStatus | None) -> Observed:
    """Return the observation of a job of that age and ledger."""
    job = observed.job
    metadata = job.metadata.model_copy(update={"creation_timestamp": to_timestamp(created)})
    status = job.status.model_copy(update={"goodput": ledger})
    return replace(observed, job=job.model_copy(update={"metadata": metadata, "status": status}))


def durable(observed: Observed, status: LLMTrainJobStatus, later: float = 0.0) -> Observed:
    written = LLMTrainJobStatus.model_validate(json.loads(json.dumps(status.to_wire())))
    job = observed.job.model_copy(update={"status": written})
    return replace(observed, job=job, now=observed.now + later)


@thorough
@given(observations(), st.one_of(ledgers(), st.just((NOW - 1000.0, None))), st.floats(0, 1e5))
def test_the_parts_are_the_time_since_creation(
    observed: Observed, age: tuple[float, GoodputStatus | None], later: float
) -> None:
    observed = aged(observed, *age)
    if observed.job.status.state in TERMINAL_STATES or observed.job.metadata.deletion_timestamp:
        return
    created = milliseconds(observed.job.metadata.creation_timestamp)
    until = milliseconds(age[1].accounted_until) if age[1] else created
    for pause in (0.0, 0.0, later):
        observed = replace(observed, now=observed.now + pause)
        ledger = plan(observed).status.goodput
        assert ledger is not None
        assert ledger.milliseconds.total() == milliseconds(ledger.accounted_until) - created
        assert min(ledger.milliseconds.to_wire().values()) >= 0
        assert milliseconds(ledger.accounted_until) >= until
        spent = [mark.compute_milliseconds for mark in ledger.marks]
        assert spent == sorted(spent) and max(spent, default=0) <= ledger.milliseconds.compute
        steps = [mark.step for mark in ledger.marks]
        assert steps == sorted(set(steps))
        until = milliseconds(ledger.accounted_until)
        observed = durable(observed, plan(observed).status)
        if observed.job.status.state in TERMINAL_STATES:
            return


@thorough
@given(observations(), st.one_of(ledgers(), st.just((NOW - 1000.0, None))))
def test_a_second_look_at_one_moment_books_nothing(observed: Observed, age: tuple[float, GoodputStatus | None]) -> None:
    observed = aged(observed, *age)
    observed = durable(observed, plan(observed).status)
    again = plan(observed).status
    before = observed.job.status.goodput
    assert (again.goodput is None) == (before is None)
    if again.goodput and before:
        assert again.goodput.accounted_until == before.accounted_until
        assert again.goodput.milliseconds.total() == before.milliseconds.total()
    if not differs(observed.job.status, again):
        assert again.goodput == before


# --- the simulated cluster


class World(ClusterSim):
    """Keeps its own record: when steps were made, when it was hurt, when its ranks were killed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps: list[tuple[float, int]] = []
        self.placed: list[float] = []
        self.killed: list[float] = []
        self.forget_every = 0.0

    def tick(self) -> None:
        before, running = self.step, self._running()
        super().tick()
        if self._stepped_at == self.now and self.step != before:
            self.steps.append((self.now, self.step))
        if not all(rank.running for rank in running):
            self.killed.append(self.now)
        if self.forget_every and self.now % self.forget_every == 0:
            self.crash_operator()

    def _running(self) -> list[SimRank]:
        return [rank for pod in self.pods.values() for rank in pod.agent.ranks if rank.running]


def world(forget_every: float = 0.0) -> World:
    builder = make_job().with_workers(2, 2).with_spec(training={"steps": 400, "globalBatchSize": 24})
    builder.with_metadata(creationTimestamp=to_timestamp(NOW)).with_deadlines(stopSeconds=10)
    sim = World(builder, seed=3, every_steps=40)
    sim.forget_every = forget_every
    return sim


def expected(sim: World, hurt: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return seconds by part from the record alone; `hurt` has (fault, when, when its owner lets the job go on)."""
    found = dict.fromkeys((part.value for part in GoodputPart), 0.0)
    first = sim.steps[0][0]
    placed = max(sim.placed)
    found["scheduling"], found["start"] = placed - NOW, first - placed
    took: dict[int, float] = {}
    for (before, _), (at, step) in zip(sim.steps, sim.steps[1:], strict=False):
        fault = next((entry for entry in hurt if before <= entry[2 if entry[0] == "job suspended" else 1] < at), None)
        if fault is None:
            took[step] = at - before
            continue
        name, when, until = fault
        lost = [s for s in took if s >= step]
        found["redone"] += sum(took.pop(s) for s in lost)
        if name == "rank stopped":
            verdict = next(moment for moment in sim.killed if moment >= when)
            found["hang"] += verdict - before
            found["restart"] += at - verdict
        elif name == "job suspended":
            found["suspended"] += until - before
            found["start"] += at - until
        else:
            found["redone"] += when - before
            found["restart"] += at - when
    found["compute"] += sum(took.values())
    found["checkpointStall"] = (from_timestamp(sim.status.completion_time) or 0.0) - sim.steps[-1][0]
    return found


@pytest.mark.parametrize("forget_every", [0.0, 7.0], ids=["one operator", "operators that die"])
@pytest.mark.parametrize("fault", ["rank killed", "rank stopped", "node cut off", "pod force-deleted", "job suspended"])
def test_the_ledger_says_what_the_cluster_went_through(fault: str, forget_every: float) -> None:
    sim = world(forget_every)
    sim.run(15, until_end=False)
    sim.placed = [pod.runs_at for pod in sim.pods.values()]
    hurt = []
    for _ in range(2):
        sim.run(31, until_end=False)
        hurt.append((fault, sim.now, sim.now + 6.0))
        FAULTS[fault](sim, 2)
        sim.run(60 if fault != "node cut off" else 90, until_end=False)
    sim.run(2000)
    assert sim.state is State.SUCCEEDED
    ledger = sim.status.goodput
    assert ledger is not None
    told = {name: amount / 1000 for name, amount in ledger.milliseconds.to_wire().items()}
    truth = expected(sim, hurt)
    # Scheduling and start share the moment at which a node is found for the resumed gang.
    for whole in (told, truth):
        whole["start"] += whole.pop("scheduling")
    within = (len(hurt) + 1) * (4 if forget_every else 2) * TICK
    assert {name: (told[name], truth[name]) for name in truth if abs(told[name] - truth[name]) > within} == {}
    assert ledger.accounted_until == sim.status.completion_time
    assert sum(told.values()) == pytest.approx((from_timestamp(sim.status.completion_time) or 0.0) - NOW)


def test_an_operator_that_remembers_nothing_keeps_the_same_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every look the job is read anew from its JSON, and the module that books is loaded anew."""

    def run(decide: Callable[[Observed], object]) -> list[LLMTrainJobStatus]:
        monkeypatch.setattr("tests.support.cluster_sim.plan", decide)
        sim = world()
        for fault in ("rank killed", "rank stopped", "pod deleted", "job suspended"):
            sim.run(40, until_end=False)
            FAULTS[fault](sim, 2)
        sim.run(2000)
        return [status for _, status in sim.writes]

    def afresh(observed: Observed) -> object:
        books = importlib.reload(goodput)
        monkeypatch.setattr("llmtrain_operator.core.plan.with_ledger", books.with_ledger)
        monkeypatch.setattr("llmtrain_operator.core.parked.with_ledger", books.with_ledger)
        job = observed.job
        wire = {**job.to_wire(), "status": job.status.to_wire()}
        return plan(replace(observed, job=LLMTrainJob.parse(json.loads(json.dumps(wire)))))

    assert run(plan) == run(afresh)
