"""Hub and server as an agent meets them: over real HTTP, with a real client."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from llmtrain_operator.coordinator.hub import Hub
from llmtrain_operator.coordinator.server import CoordinatorServer
from llmtrain_operator.coordinator.token import job_token
from llmtrain_operator.runtime.backend import JobKey
from tests.unit.operator.coordinator.house import (
    JOB,
    KEY,
    POD,
    RUN,
    UID,
    WAIT,
    House,
    held,
    open_house,
    progress,
    rank,
    run_scenario,
    until,
)

# ---- the long-poll


def test_a_changed_order_ends_the_held_request_at_once_and_an_unchanged_one_does_not() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        status, first = await house.sync()
        assert (status, first["order"]["kind"]) == (200, "wait")
        waiting = await held(house, sequence=2, seenVersion=first["version"])
        house.hub.publish(UID, {POD: WAIT})
        await asyncio.sleep(0.05)
        assert not waiting.done()
        house.hub.publish(UID, {POD: RUN})
        status, second = await waiting
        assert (status, second["order"]["kind"]) == (200, "run")
        assert second["version"] != first["version"]

    run_scenario(scenario)


def test_a_held_request_ends_by_itself_with_the_same_order() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        _, first = await house.sync()
        status, again = await house.sync(sequence=2, seenVersion=first["version"])
        assert (status, again) == (200, first)

    run_scenario(scenario, hold_seconds=0.05)


def test_a_first_report_waits_for_its_order_and_is_news() -> None:
    async def scenario(house: House) -> None:
        waiting = await held(house)
        assert house.news == [JOB]
        house.hub.publish(UID, {POD: RUN})
        status, answer = await waiting
        assert (status, answer["order"]["kind"]) == (200, "run")

    run_scenario(scenario)


def test_a_worker_that_gets_no_order_is_told_to_ask_again() -> None:
    async def scenario(house: House) -> None:
        status, answer = await house.sync()
        assert status == 404
        assert "no order" in answer["error"]
        assert house.hub.agents(UID)[POD].agent_id == "a"

    run_scenario(scenario, hold_seconds=0.05)


def test_a_restarted_operator_answers_at_once_although_the_order_is_the_same() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        _, first = await house.sync()
        async with open_house() as restarted:
            restarted.hub.publish(UID, {POD: WAIT})
            _, second = await restarted.sync(sequence=2, seenVersion=first["version"])
        assert second["order"] == first["order"]
        assert second["version"] != first["version"]

    run_scenario(scenario)


def test_a_newer_request_ends_the_abandoned_one_and_a_late_one_changes_nothing() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        _, first = await house.sync(sequence=1)
        old = await held(house, sequence=2, seenVersion=first["version"])
        new = asyncio.ensure_future(
            house.sync(sequence=4, seenVersion=first["version"], attempt=1, ranks=[rank("exited", exitCode=1)])
        )
        assert (await old)[0] == 200
        status, _ = await house.sync(sequence=3, seenVersion=first["version"], attempt=1, ranks=[rank()])
        assert status == 200
        assert house.hub.agents(UID)[POD].ranks[0].state == "exited"
        assert not new.done()
        new.cancel()

    run_scenario(scenario)


def test_an_agent_is_seen_when_it_asks_and_not_while_a_connection_stays_open() -> None:
    """A node that is cut off closes no connection: only what arrives is a sign of life."""

    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        _, first = await house.sync()
        waiting = await held(house, sequence=2, seenVersion=first["version"])
        earlier = house.hub.agents(UID)[POD].last_seen
        await asyncio.sleep(0.02)
        assert house.hub.agents(UID)[POD].last_seen == earlier == house.hub.heard_at
        waiting.cancel()
        await until(lambda: house.hub.connected() == 0)
        left = house.hub.agents(UID)[POD].last_seen
        await asyncio.sleep(0.02)
        assert house.hub.agents(UID)[POD].last_seen == left
        assert house.hub.silences()[JOB][0] > 0.01

    run_scenario(scenario)


def test_a_graceful_stop_ends_held_requests_at_once() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        _, first = await house.sync()
        waiting = await held(house, sequence=2, seenVersion=first["version"])
        await house.server.stop()
        assert (await waiting)[0] == 503

    run_scenario(scenario)


# ---- who is who


def test_another_agent_of_the_same_worker_supersedes_the_older_one_for_good() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        _, first = await house.sync(agentId="old", sequence=5)
        waiting = await held(house, agentId="old", sequence=6, seenVersion=first["version"])
        assert (await house.sync(agentId="new", sequence=1))[0] == 200
        assert (await waiting)[0] == 409
        assert (await house.sync(agentId="old", sequence=7))[0] == 409
        assert house.hub.agents(UID)[POD].agent_id == "new"

    run_scenario(scenario)


def test_a_job_of_the_same_name_but_another_uid_makes_the_old_token_worthless() -> None:
    async def scenario(house: House) -> None:
        waiting = await held(house)
        house.hub.admit(JOB, "uid-2", [POD])
        assert (await waiting)[0] == 404
        assert (await house.sync())[0] == 403
        status, _ = await house.sync(jobUid=UID, token=job_token(KEY, "uid-2"))
        assert status == 404
        assert house.hub.agents(UID) == {}

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("request_fields", "status"),
    [
        ({"token": job_token(KEY, "uid-2")}, 403),
        ({"token": "nonsense"}, 403),
        ({"token": ""}, 401),
        ({"job": JobKey("research", "other")}, 404),
        ({"job": JobKey("other", "llama")}, 404),
        ({"pod": "llama-w9-a1"}, 404),
        ({"jobUid": "uid-2"}, 404),
    ],
    ids=["another job's token", "nonsense token", "no token", "unknown job", "other namespace", "unknown pod", "uid"],
)
def test_strangers_are_refused(request_fields: dict[str, Any], status: int) -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        answer = await house.sync(**request_fields)
        assert answer[0] == status
        assert answer[1]["error"]
        assert house.news == []
        assert house.hub.agents(UID) == {}

    run_scenario(scenario)


def test_a_forgotten_job_and_a_removed_worker_end_their_held_requests() -> None:
    async def scenario(house: House) -> None:
        house.hub.admit(JOB, UID, [POD, "llama-w1-a1"])
        removed = await held(house, pod="llama-w1-a1")
        house.hub.admit(JOB, UID, [POD])
        assert (await removed)[0] == 404
        waiting = await held(house)
        house.hub.forget(UID)
        assert (await waiting)[0] == 404
        assert (await house.sync())[0] == 404

    run_scenario(scenario)


# ---- what is news


@pytest.mark.parametrize(
    ("report", "is_news"),
    [
        ({}, False),
        ({"progress": progress(step=6)}, False),
        ({"progress": None}, False),
        ({"progress": progress(step=6, checkpoint_step=5)}, True),
        ({"progress": progress(step=1, attempt=2)}, True),
        ({"ranks": [rank(), rank(localRank=1)]}, True),
        ({"ranks": [rank("exited", exitCode=1)]}, True),
        ({"ranks": [rank("exited", signal=9)]}, True),
        ({"ranks": [rank(pid=8)]}, True),
        ({"attempt": 2}, True),
        ({"stopping": True}, True),
        ({"agentId": "b"}, True),
    ],
    ids=lambda value: str(value)[:60],
)
def test_only_what_may_change_a_decision_is_news(report: dict[str, Any], is_news: bool) -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        base = {"attempt": 1, "ranks": [rank()], "progress": progress(step=5)}
        await house.sync(sequence=1, **base)
        assert house.news == [JOB]
        status, _ = await house.sync(sequence=2, **{**base, **report})
        assert status == 200
        assert len(house.news) == (2 if is_news else 1)

    run_scenario(scenario)


def test_silent_progress_is_kept_and_what_was_reached_stays_known() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        for sequence, step in enumerate([1, 2, 3]):
            await house.sync(sequence=sequence, progress=progress(step=step))
        await house.sync(sequence=9)
        reached = house.hub.agents(UID)[POD].progress
        assert reached is not None and reached.step == 3
        assert len(house.news) == 1

    run_scenario(scenario)


def test_an_agent_that_comes_back_after_a_silence_is_news() -> None:
    now = [1000.0]

    async def main() -> None:
        news: list[JobKey] = []
        hub = Hub(news.append, clock=lambda: now[0], hold_seconds=0.01)
        hub.admit(JOB, UID, [POD])
        hub.publish(UID, {POD: RUN})
        server = CoordinatorServer(hub, KEY, "127.0.0.1", 0)
        await server.start()
        async with aiohttp.ClientSession() as session:
            house = House(hub, server, session, news)
            await house.sync(sequence=1)
            now[0] += 5
            await house.sync(sequence=2)
            assert len(news) == 1
            now[0] += 60
            await house.sync(sequence=3)
            assert len(news) == 2
        await server.stop()

    asyncio.run(main())


def test_an_agent_that_leaves_is_answered_at_once_and_what_it_said_is_kept() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        _, first = await house.sync()
        status, last = await asyncio.wait_for(
            house.sync(sequence=2, seenVersion=first["version"], stopping=True, leaving=True), 10
        )
        assert (status, last["version"]) == (200, first["version"])
        assert house.hub.agents(UID)[POD].stopping
        assert house.hub.silences() == {JOB: []}
        status, _ = await asyncio.wait_for(house.sync(pod="llama-w1-a1", leaving=True), 10)
        assert status == 404

    run_scenario(scenario, hold_seconds=600)


def test_a_wrong_token_for_a_known_job_is_told_to_who_can_renew_it() -> None:
    async def main() -> None:
        wrong: list[JobKey] = []
        refused: list[int] = []
        hub = Hub(lambda _: None)
        hub.admit(JOB, UID, [POD])
        server = CoordinatorServer(hub, KEY, "127.0.0.1", 0, wrong.append, refused.append)
        await server.start()
        async with aiohttp.ClientSession() as session:
            house = House(hub, server, session)
            for token, job in (("0" * 64, JOB), ("0" * 64, JobKey("research", "nobody")), ("", JOB)):
                await house.sync(token=token, job=job)
        await server.stop()
        assert wrong == [JOB]
        assert refused == [403, 404, 401]

    asyncio.run(main())
