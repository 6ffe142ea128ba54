"""What holds for every plan, whatever is observed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain_api.constants import TERMINAL_STATES
from llmtrain_api.status import MAX_FAILURES, LLMTrainJobStatus
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.plan import plan
from tests.unit.operator.core.observations import observations

thorough = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def after(observed: Observed, decision: Plan) -> Observed:
    """Return what the next plan sees when only the status was written."""
    written = LLMTrainJobStatus.model_validate(decision.status.to_wire())
    return replace(observed, job=observed.job.model_copy(update={"status": written}))


@thorough
@given(observations(), st.randoms())
def test_a_plan_depends_on_nothing_but_the_facts(observed: Observed, random: object) -> None:
    shuffled = list(observed.workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan(observed) == plan(replace(observed, workers=tuple(shuffled)))


@thorough
@given(observations())
def test_a_status_is_always_one_that_the_api_accepts(observed: Observed) -> None:
    status = plan(observed).status
    assert LLMTrainJobStatus.model_validate(status.to_wire()) == status
    assert len(status.failures) <= MAX_FAILURES


@thorough
@given(observations())
def test_the_attempt_rises_by_recorded_steps_and_never_falls(observed: Observed) -> None:
    old, new = observed.job.status, plan(observed).status
    assert new.attempt >= old.attempt
    assert new.started_attempt >= old.started_attempt
    assert new.started_attempt <= new.attempt
    assert new.restarts.total - old.restarts.total <= 1
    if new.attempt > old.attempt or new.started_attempt > old.started_attempt:
        assert plan(observed).status_changed


@thorough
@given(observations())
def test_orders_to_run_are_complete_consistent_and_durable(observed: Observed) -> None:
    decision = plan(observed)
    runs = {name: order for name, order in decision.orders.items() if order.kind == "run"}
    if not runs:
        return
    assignments = [order.assignment for order in runs.values() if order.assignment]
    assert len(assignments) == len(runs) == observed.job.spec.workers.replicas
    assert sorted(a.node_rank for a in assignments) == list(range(len(runs)))
    assert len({(a.attempt, a.master_address, a.master_port) for a in assignments}) == 1
    assert assignments[0].attempt == decision.status.attempt == decision.status.started_attempt
    assert not {create.index for create in decision.create}


@thorough
@given(observations())
def test_new_names_are_free_and_deletions_name_what_is_there(observed: Observed) -> None:
    decision = plan(observed)
    known = {worker.name: worker.uid for worker in observed.workers}
    assert not known.keys() & {create.name for create in decision.create}
    assert all(known[delete.name] == delete.uid for delete in decision.delete)
    assert len({create.index for create in decision.create}) == len(decision.create)
    deleted = {delete.name for delete in decision.delete}
    assert not deleted & {name for name, order in decision.orders.items() if order.kind == "run"}


@thorough
@given(observations())
def test_terminal_states_are_never_left_and_never_rewritten(observed: Observed) -> None:
    decision = plan(observed)
    old = observed.job.status
    if old.state in TERMINAL_STATES:
        assert decision.status == old and not decision.status_changed
        assert not decision.create and not decision.events
    if decision.status.state in TERMINAL_STATES:
        again = plan(after(observed, decision))
        assert again.status == LLMTrainJobStatus.model_validate(decision.status.to_wire())
        assert not again.status_changed and not again.create


@thorough
@given(observations())
def test_repeated_plans_settle(observed: Observed) -> None:
    """With the world standing still, a few writes are enough: there is no loop of writes."""
    for _ in range(12):
        decision = plan(observed)
        if not decision.status_changed:
            return
        observed = after(observed, decision)
    raise AssertionError(f"still writing: {decision.status}")


@thorough
@given(observations())
def test_a_wait_has_an_end_in_the_future_or_an_event_to_wait_for(observed: Observed) -> None:
    decision = plan(observed)
    assert decision.requeue_after is None or 0 <= decision.requeue_after < 400 * 86_400
