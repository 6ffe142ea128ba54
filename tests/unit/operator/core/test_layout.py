"""A job that leaves its layout to the planner: what ranks and status get, and how long it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmtrain_api.constants import ConditionType, State
from llmtrain_api.planning import decision
from llmtrain_api.planning.decision import decided
from llmtrain_api.spec import LLMTrainJobSpec, Parallelism
from llmtrain_api.status import LLMTrainJobStatus, Shape
from llmtrain_operator.core import layout
from llmtrain_operator.core.actions import Plan
from tests.support.jobs import NOW, JobBuilder, decide, make_agent, make_gang, make_job, make_observed, make_worker

OTHER = Parallelism(tensor=2, zero_stage=2, recompute="full")
"""Legal for the job of these tests, and not what the planner chooses."""


def planned(replicas: int = 2) -> JobBuilder:
    return make_job().with_workers(replicas, 2).with_spec(parallelism={"planFor": "cpu"})


def chosen(builder: JobBuilder) -> Parallelism:
    return decided(builder.build().spec).parallelism


def started(builder: JobBuilder) -> Plan:
    decide(builder, [])
    return decide(builder, make_gang(attempt=0))


def training(builder: JobBuilder, **shape: Any) -> JobBuilder:
    """A job under way for a minute, with the shape in force."""
    axes = {name: value for name, value in OTHER.model_dump().items() if name != "plan_for"}
    return builder.running(shape=Shape(**{"world_size": 4, "shard": 2, **axes, **shape}))


def specs(decision: Plan) -> list[LLMTrainJobSpec]:
    assignments = [order.assignment for order in decision.orders.values()]
    return [LLMTrainJobSpec.model_validate(a.spec) for a in assignments if a]


@pytest.fixture
def other_planner(monkeypatch: pytest.MonkeyPatch) -> list[LLMTrainJobSpec]:
    """A newer operator, whose planner chooses otherwise; returns what it was asked."""
    asked: list[LLMTrainJobSpec] = []

    def choose(spec: LLMTrainJobSpec) -> LLMTrainJobSpec:
        asked.append(spec)
        return spec.model_copy(update={"parallelism": OTHER})

    monkeypatch.setattr(layout, "decided", choose)
    return asked


def test_ranks_and_status_get_the_decided_layout() -> None:
    builder = planned()
    decision = started(builder)
    assert len(specs(decision)) == 2
    for spec in specs(decision):
        assert spec.parallelism == chosen(builder)
        assert spec.parallelism.plan_for is None
    shape = decision.status.shape
    assert shape is not None and shape.parallelism() == chosen(builder)
    assert (shape.pipeline_schedule, shape.recompute, shape.world_size) == ("1F1B", "none", 4)
    assert builder.build().spec.parallelism.plan_for == "cpu", "the stored spec is the user's"


def test_a_layout_by_hand_is_told_in_the_status_too() -> None:
    decision = decide(make_job().with_spec(parallelism={"recompute": "full"}), [])
    assert decision.status.shape is not None
    assert (decision.status.shape.recompute, decision.status.shape.pipeline_schedule) == ("full", "1F1B")


def test_a_running_job_keeps_its_shape_when_a_newer_planner_would_choose_otherwise(
    other_planner: list[LLMTrainJobSpec],
) -> None:
    builder = planned()
    with pytest.MonkeyPatch.context() as before:
        before.setattr(layout, "decided", decided)
        started(builder)
    mine = chosen(builder)
    assert mine != OTHER
    decision = decide(builder, make_gang())
    assert decision.status.attempt == 1 and not decision.delete and not decision.create
    assert [spec.parallelism for spec in specs(decision)] == [mine, mine]
    assert decision.status.shape is not None and decision.status.shape.parallelism() == mine
    assert other_planner == [], "a plan is not even made"


def test_a_failure_and_a_suspension_change_nothing_about_it(other_planner: list[LLMTrainJobSpec]) -> None:
    builder = training(planned(), tensor=1, shard=4)
    builder.with_spec(suspend=True)
    assert decide(builder, make_gang()).status.state is State.SUSPENDED
    builder.with_spec(suspend=False)
    decide(builder, [])
    workers = [make_worker(i, 2, agent=make_agent(i)) for i in range(2)]
    [first, _] = specs(decide(builder, workers))
    assert first.parallelism == OTHER.model_copy(update={"tensor": 1})
    assert other_planner == []


def test_another_number_of_ranks_is_planned_anew(other_planner: list[LLMTrainJobSpec]) -> None:
    builder = training(planned(), tensor=1, shard=4)
    builder.with_spec(workers={"replicas": 3})
    decision = decide(builder, make_gang())
    assert decision.status.attempt == 2
    assert decision.status.shape is not None
    assert (decision.status.shape.world_size, decision.status.shape.tensor) == (6, 2)
    assert len(other_planner) == 1


def test_a_status_that_tells_no_layout_is_planned_anew() -> None:
    builder = training(planned(), recompute="sometimes")
    decision = decide(builder, make_gang())
    assert decision.status.shape is not None and decision.status.shape.parallelism() == chosen(builder)


@pytest.mark.parametrize("parallelism", [{"pipeline": 2, "pipelineSchedule": "GPipe"}, {"recompute": "full"}])
def test_a_job_of_an_operator_that_recorded_less_goes_on_and_is_recorded(parallelism: dict[str, Any]) -> None:
    builder = make_job().with_spec(parallelism=parallelism)
    started(builder)
    status = builder.build().status
    assert status.shape is not None
    old = status.shape.model_copy(update={"pipeline_schedule": None, "recompute": None})
    builder.with_status(LLMTrainJobStatus.model_validate({**status.to_wire(), "shape": old.to_wire()}))
    decision = decide(builder, make_gang())
    assert decision.status.attempt == 1 and not decision.delete
    assert decision.status.shape == status.shape


HUGE = {"preset": "llama-8b"}


def _nothing_legal(builder: JobBuilder) -> JobBuilder:
    model = {"preset": "tiny", "layers": 1, "heads": 3, "kvHeads": 3, "dim": 48, "sequenceLength": 63}
    return builder.with_spec(model=model, training={"globalBatchSize": 1})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda builder: builder.with_spec(model=HUGE),
            "spec.parallelism.planFor: no layout fits cpu; allowed: 8.0 GB for all ranks of a worker together; the ",
        ),
        (_nothing_legal, "spec.parallelism.planFor: no layout is legal, on cpu or elsewhere; allowed: "),
    ],
    ids=["nothing fits", "nothing is legal"],
)
def test_without_a_layout_the_job_is_refused_before_any_pod(
    change: Callable[[JobBuilder], JobBuilder], said: str
) -> None:
    decision = decide(change(planned()), [])
    assert not decision.create and not decision.orders
    assert decision.status.state is State.BLOCKED and decision.status.attempt == 0
    accepted = decision.status.condition(ConditionType.ACCEPTED)
    assert accepted is not None and (accepted.status, accepted.reason) == ("False", "InvalidSpec")
    assert accepted.message.startswith(said)


def test_what_breaks_a_rule_is_not_planned(other_planner: list[LLMTrainJobSpec]) -> None:
    decision = decide(planned(), [], spec_errors=("spec.parallelism.tensor: 2 is refused",))
    assert decision.status.state is State.BLOCKED
    assert other_planner == []


def test_a_job_that_is_over_or_anothers_is_not_planned(other_planner: list[LLMTrainJobSpec]) -> None:
    decide(planned().with_status(state=State.SUCCEEDED, attempt=1), [])
    decide(planned().with_spec(managedBy="kueue.example/controller"), [])
    assert other_planner == []


def test_a_pass_of_the_loop_pays_for_no_second_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plan = decision.plan
    monkeypatch.setattr(decision, "plan", lambda *given, **more: (made.append(1), plan(*given, **more))[1])
    decision._answer.cache_clear()
    builder = planned().with_spec(model=HUGE)
    for later in range(3):
        decide(builder, [], now=NOW + later)
    assert len(made) == 1
    assert layout.with_layout(make_observed(builder)).spec_errors
