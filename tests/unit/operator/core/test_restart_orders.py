"""What agents are told around a restart: who gets time for a checkpoint, who starts when, and what a restarted
operator repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.observed import Policy, Worker
from tests.support.jobs import (
    NOW,
    decide,
    make_agent,
    make_gang,
    make_job,
    make_rank,
    make_worker,
)


def told(decision: Plan) -> dict[str, tuple[str, int, float]]:
    return {name: (order.kind, order.attempt, order.grace_seconds) for name, order in decision.orders.items()}


def seen(workers: list[Worker], now: float) -> list[Worker]:
    return [replace(w, agent=replace(w.agent, last_seen=now)) if w.agent else w for w in workers]


def test_peers_of_a_worker_that_is_being_deleted_checkpoint_together_with_it() -> None:
    builder = make_job().running()
    gang = make_gang()
    leaving = [gang[0], replace(gang[1], deleting=True)]
    decision = decide(builder, leaving)
    assert told(decision) == {"demo-w0-a1": ("wait", 2, 60.0), "demo-w1-a1": ("wait", 2, 60.0)}
    assert [create.name for create in decision.create] == ["demo-w1-a2"]


def test_the_grace_outlives_the_worker_that_left_first_and_an_operator_restart() -> None:
    builder = make_job().running()
    gang = make_gang()
    decide(builder, [gang[0], replace(gang[1], deleting=True)])
    new = make_worker(1, 2, agent=make_agent(1))
    decision = decide(builder, [gang[0], new], NOW + 2)
    assert told(decision)["demo-w0-a1"] == ("wait", 2, 60.0)
    assert decision.status.started_attempt == 1
    forgetful = [replace(worker, agent=None) for worker in (gang[0], new)]
    assert told(decide(builder, forgetful, NOW + 3))["demo-w0-a1"] == ("wait", 2, 60.0)


def test_the_attempt_starts_when_the_last_old_rank_has_ended() -> None:
    builder = make_job().running()
    gang = make_gang()
    decide(builder, [gang[0], replace(gang[1], deleting=True)])
    done = replace(gang[0], agent=make_agent(0, 1, [make_rank(0, 143, by_agent=True)], last_seen=NOW + 3))
    decision = decide(builder, [done, make_worker(1, 2, agent=make_agent(1))], NOW + 3)
    assert {kind for kind, _, _ in told(decision).values()} == {"run"}
    assert decision.status.started_attempt == 2


def test_the_grace_ends() -> None:
    builder = make_job().running()
    gang = make_gang()
    decide(builder, [gang[0], replace(gang[1], deleting=True)])
    stuck = seen([gang[0], make_worker(1, 2, agent=make_agent(1))], NOW + 59)
    assert decide(builder, stuck, NOW + 59).requeue_after == pytest.approx(1.0)
    assert decide(builder, stuck, NOW + 60).status.started_attempt == 2


def test_peers_of_a_worker_that_is_gone_are_ended_at_once() -> None:
    assert told(decide(make_job().running(), make_gang()[:1])) == {"demo-w0-a1": ("wait", 2, 0.0)}


def test_peers_of_a_deleted_worker_whose_ranks_have_ended_are_ended_at_once() -> None:
    gang = make_gang()
    ended = replace(gang[1], deleting=True, agent=make_agent(1, 1, [make_rank(1, signal=9)]))
    assert told(decide(make_job().running(), [gang[0], ended]))["demo-w0-a1"] == ("wait", 2, 0.0)


def test_an_agent_told_to_stop_counts_as_leaving_before_its_pod_says_so() -> None:
    gang = make_gang()
    stopping = replace(gang[1], agent=make_agent(1, 1, stopping=True))
    decision = decide(make_job().running(), [gang[0], stopping])
    assert decision.status.failures[0].failure_class.value == "Disruption"
    assert [(d.name, d.grace_seconds) for d in decision.delete] == [("demo-w1-a1", None)]
    assert told(decision)["demo-w0-a1"] == ("wait", 2, 60.0)


def test_a_restarted_operator_changes_nothing_while_agents_come_back() -> None:
    builder = make_job().running()
    decide(builder, make_gang())
    nobody = [make_worker(0), make_worker(1)]
    first = decide(builder, nobody, NOW + 5)
    assert not first.status_changed and not first.create and not first.delete
    one = decide(builder, [nobody[0], make_gang()[1]], NOW + 6)
    assert not one.status_changed
    assert told(one) == {"demo-w0-a1": ("wait", 1, 0.0), "demo-w1-a1": ("wait", 1, 0.0)}
    both = decide(builder, seen(make_gang(), NOW + 7), NOW + 7)
    assert {kind for kind, _, _ in told(both).values()} == {"run"} and both.status.attempt == 1


def test_an_agent_that_missed_the_order_gets_it_again() -> None:
    builder = make_job().running()
    gang = [make_gang()[0], make_gang(attempt=0)[1]]
    decision = decide(builder, gang)
    assert told(decision)["demo-w1-a1"] == ("run", 1, 0.0) and decision.status.attempt == 1


def test_reports_of_an_older_attempt_are_history() -> None:
    gang = [make_worker(i, agent=make_agent(i, 1, [make_rank(i, 1)])) for i in range(2)]
    decision = decide(make_job().running(attempt=2), gang)
    assert decision.status.attempt == 2 and not decision.status.failures


def test_the_view_of_an_agent_older_than_its_worker_is_ignored() -> None:
    builder = make_job()
    decide(builder, [])
    stale = [replace(w, created_at=NOW + 100) for w in make_gang(attempt=0)]
    assert decide(builder, stale, NOW + 101).status.started_attempt == 0


def test_every_attempt_has_its_own_port_within_the_span() -> None:
    policy = Policy(rendezvous_port_base=40_000, rendezvous_port_span=10)
    decision = decide(make_job().running(attempt=23), make_gang(attempt=23), policy=policy)
    assert {o.assignment and o.assignment.master_port for o in decision.orders.values()} == {40_003}


def test_a_leaving_worker_keeps_its_own_grace_when_its_peers_are_ended_at_once() -> None:
    builder = make_job().with_workers(3).running()
    gang = make_gang(3)
    ended = [make_rank(1, signal=9)]
    decide(builder, [gang[0], replace(gang[1], deleting=True, agent=make_agent(1, 1, ended)), gang[2]])
    decision = decide(builder, [gang[0], replace(gang[2], deleting=True)], NOW + 1)
    assert told(decision) == {"demo-w0-a1": ("wait", 2, 0.0), "demo-w2-a1": ("wait", 2, 60.0)}
