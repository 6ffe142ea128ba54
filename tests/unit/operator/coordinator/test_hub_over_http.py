"""Hub and server as an agent meets them: over real HTTP, with a real client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain_api.sync import MAX_BODY_BYTES, Order
from llmtrain_operator.coordinator.hub import Hub
from llmtrain_operator.coordinator.server import CoordinatorServer
from llmtrain_operator.coordinator.token import job_token
from llmtrain_operator.runtime.backend import JobKey

KEY = bytes(range(32))
JOB = JobKey("research", "llama")
UID = "uid-1"
POD = "llama-w0-a1"
WAIT = Order(kind="wait", attempt=1)
RUN = Order(kind="run", attempt=1)


@dataclass
class House:
    """A coordinator that listens, and a client."""

    hub: Hub
    server: CoordinatorServer
    session: aiohttp.ClientSession
    news: list[JobKey] = field(default_factory=list)

    async def sync(
        self, *, pod: str = POD, job: JobKey = JOB, token: str | None = None, **fields: Any
    ) -> tuple[int, Any]:
        body = {"jobUid": UID, "agentId": "a", "sequence": 1, "address": "10.0.0.1", **fields}
        async with self.session.post(self.url(job, pod), json=body, headers=_bearer(token)) as response:
            return response.status, await response.json()

    def url(self, job: JobKey = JOB, pod: str = POD) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1/jobs/{job.namespace}/{job.name}/workers/{pod}/sync"


def _bearer(token: str | None = None) -> dict[str, str]:
    return {"Authorization": f"Bearer {job_token(KEY, UID) if token is None else token}"}


@contextlib.asynccontextmanager
async def _house(hold_seconds: float = 30.0) -> AsyncIterator[House]:
    news: list[JobKey] = []
    hub = Hub(news.append, hold_seconds=hold_seconds)
    hub.admit(JOB, UID, [POD])
    server = CoordinatorServer(hub, KEY, "127.0.0.1", 0)
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield House(hub, server, session, news)
    await server.stop()


def _run(scenario: Callable[[House], Awaitable[None]], hold_seconds: float = 30.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), _house(hold_seconds) as house:
            await scenario(house)

    asyncio.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the hub tells nobody
        await asyncio.sleep(0.005)


async def _held(house: House, **fields: Any) -> asyncio.Task[tuple[int, Any]]:
    """Start a request that is held, and return once the hub holds it."""
    before = house.hub.connected()
    task = asyncio.ensure_future(house.sync(**fields))
    await _until(lambda: house.hub.connected() > before or task.done())
    assert not task.done(), await task
    return task


def _rank(state: str = "running", **fields: Any) -> dict[str, Any]:
    return {"localRank": 0, "globalRank": 0, "pid": 7, "state": state, **fields}


def _progress(step: int, attempt: int = 1, checkpoint_step: int = -1) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "step": step,
        "firstStep": 1,
        "firstStepAt": 1.0,
        "steps": 100,
        "tokens": step * 10,
        "loss": 1.5,
        "stepAt": 2.0,
        "checkpointStep": checkpoint_step,
    }


# ---- the long-poll


def test_a_changed_order_ends_the_held_request_at_once_and_an_unchanged_one_does_not() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        status, first = await house.sync()
        assert (status, first["order"]["kind"]) == (200, "wait")
        held = await _held(house, sequence=2, seenVersion=first["version"])
        house.hub.publish(UID, {POD: WAIT})
        await asyncio.sleep(0.05)
        assert not held.done()
        house.hub.publish(UID, {POD: RUN})
        status, second = await held
        assert (status, second["order"]["kind"]) == (200, "run")
        assert second["version"] != first["version"]

    _run(scenario)


def test_a_held_request_ends_by_itself_with_the_same_order() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        _, first = await house.sync()
        status, again = await house.sync(sequence=2, seenVersion=first["version"])
        assert (status, again) == (200, first)

    _run(scenario, hold_seconds=0.05)


def test_a_first_report_waits_for_its_order_and_is_news() -> None:
    async def scenario(house: House) -> None:
        held = await _held(house)
        assert house.news == [JOB]
        house.hub.publish(UID, {POD: RUN})
        status, answer = await held
        assert (status, answer["order"]["kind"]) == (200, "run")

    _run(scenario)


def test_a_worker_that_gets_no_order_is_told_to_ask_again() -> None:
    async def scenario(house: House) -> None:
        status, answer = await house.sync()
        assert status == 404
        assert "no order" in answer["error"]
        assert house.hub.agents(UID)[POD].agent_id == "a"

    _run(scenario, hold_seconds=0.05)


def test_a_restarted_operator_answers_at_once_although_the_order_is_the_same() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        _, first = await house.sync()
        async with _house() as restarted:
            restarted.hub.publish(UID, {POD: WAIT})
            _, second = await restarted.sync(sequence=2, seenVersion=first["version"])
        assert second["order"] == first["order"]
        assert second["version"] != first["version"]

    _run(scenario)


def test_a_newer_request_ends_the_abandoned_one_and_a_late_one_changes_nothing() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        _, first = await house.sync(sequence=1)
        old = await _held(house, sequence=2, seenVersion=first["version"])
        new = asyncio.ensure_future(
            house.sync(sequence=4, seenVersion=first["version"], attempt=1, ranks=[_rank("exited", exitCode=1)])
        )
        assert (await old)[0] == 200
        status, _ = await house.sync(sequence=3, seenVersion=first["version"], attempt=1, ranks=[_rank()])
        assert status == 200
        assert house.hub.agents(UID)[POD].ranks[0].state == "exited"
        assert not new.done()
        new.cancel()

    _run(scenario)


def test_a_held_request_counts_as_seen_now_and_a_closed_connection_does_not() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        _, first = await house.sync()
        held = await _held(house, sequence=2, seenVersion=first["version"])
        earlier = house.hub.agents(UID)[POD].last_seen
        await asyncio.sleep(0.02)
        assert house.hub.agents(UID)[POD].last_seen > earlier
        held.cancel()
        await _until(lambda: house.hub.connected() == 0)
        left = house.hub.agents(UID)[POD].last_seen
        await asyncio.sleep(0.02)
        assert house.hub.agents(UID)[POD].last_seen == left

    _run(scenario)


def test_a_graceful_stop_ends_held_requests_at_once() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: WAIT})
        _, first = await house.sync()
        held = await _held(house, sequence=2, seenVersion=first["version"])
        await house.server.stop()
        assert (await held)[0] == 503

    _run(scenario)


# ---- who is who


def test_another_agent_of_the_same_worker_supersedes_the_older_one_for_good() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        _, first = await house.sync(agentId="old", sequence=5)
        held = await _held(house, agentId="old", sequence=6, seenVersion=first["version"])
        assert (await house.sync(agentId="new", sequence=1))[0] == 200
        assert (await held)[0] == 409
        assert (await house.sync(agentId="old", sequence=7))[0] == 409
        assert house.hub.agents(UID)[POD].agent_id == "new"

    _run(scenario)


def test_a_job_of_the_same_name_but_another_uid_makes_the_old_token_worthless() -> None:
    async def scenario(house: House) -> None:
        held = await _held(house)
        house.hub.admit(JOB, "uid-2", [POD])
        assert (await held)[0] == 404
        assert (await house.sync())[0] == 403
        status, _ = await house.sync(jobUid=UID, token=job_token(KEY, "uid-2"))
        assert status == 404
        assert house.hub.agents(UID) == {}

    _run(scenario)


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

    _run(scenario)


def test_a_forgotten_job_and_a_removed_worker_end_their_held_requests() -> None:
    async def scenario(house: House) -> None:
        house.hub.admit(JOB, UID, [POD, "llama-w1-a1"])
        removed = await _held(house, pod="llama-w1-a1")
        house.hub.admit(JOB, UID, [POD])
        assert (await removed)[0] == 404
        held = await _held(house)
        house.hub.forget(UID)
        assert (await held)[0] == 404
        assert (await house.sync())[0] == 404

    _run(scenario)


# ---- what is news


@pytest.mark.parametrize(
    ("report", "is_news"),
    [
        ({}, False),
        ({"progress": _progress(step=6)}, False),
        ({"progress": None}, False),
        ({"progress": _progress(step=6, checkpoint_step=5)}, True),
        ({"progress": _progress(step=1, attempt=2)}, True),
        ({"ranks": [_rank(), _rank(localRank=1)]}, True),
        ({"ranks": [_rank("exited", exitCode=1)]}, True),
        ({"ranks": [_rank("exited", signal=9)]}, True),
        ({"ranks": [_rank(pid=8)]}, True),
        ({"attempt": 2}, True),
        ({"stopping": True}, True),
        ({"agentId": "b"}, True),
    ],
    ids=lambda value: str(value)[:60],
)
def test_only_what_may_change_a_decision_is_news(report: dict[str, Any], is_news: bool) -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        base = {"attempt": 1, "ranks": [_rank()], "progress": _progress(step=5)}
        await house.sync(sequence=1, **base)
        assert house.news == [JOB]
        status, _ = await house.sync(sequence=2, **{**base, **report})
        assert status == 200
        assert len(house.news) == (2 if is_news else 1)

    _run(scenario)


def test_silent_progress_is_kept_and_what_was_reached_stays_known() -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        for sequence, step in enumerate([1, 2, 3]):
            await house.sync(sequence=sequence, progress=_progress(step=step))
        await house.sync(sequence=9)
        progress = house.hub.agents(UID)[POD].progress
        assert progress is not None and progress.step == 3
        assert len(house.news) == 1

    _run(scenario)


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


# ---- nonsense


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"", 400, "body"),
        (b"{", 400, "body"),
        (b"[]", 400, "body"),
        (b'{"jobUid": "u", "agentId": "a", "sequence": -1, "address": "x"}', 400, "sequence"),
        (b'{"jobUid": "u", "agentId": "a", "sequence": 1}', 400, "address"),
        (b'{"jobUid": "u", "agentId": "a", "sequence": 1, "address": "x", "ranks": [{}]}', 400, "ranks.0.localRank"),
        (b'{"jobUid": "u", "agentId": "a", "sequence": 1, "address": "x", "protocol": 2}', 400, "protocol"),
        (b"\xff\xfe", 400, "body"),
        (b"[" * 100_000, 400, "body"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "bytes"),
    ],
    ids=["empty", "cut", "list", "negative", "missing", "rank", "protocol", "not utf-8", "deep", "too long"],
)
def test_a_malformed_report_is_refused_and_the_field_is_named(body: bytes, status: int, named: str) -> None:
    async def scenario(house: House) -> None:
        async with house.session.post(house.url(), data=body, headers=_bearer()) as response:
            answer = await response.json()
        assert response.status == status
        assert named in answer["error"]
        assert house.hub.agents(UID) == {}

    _run(scenario)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("GET", None, 405), ("PUT", "/v1", 404)])
def test_other_requests_get_a_readable_refusal(method: str, path: str | None, status: int) -> None:
    async def scenario(house: House) -> None:
        url = house.url() if path is None else f"http://127.0.0.1:{house.server.port}{path}"
        async with house.session.request(method, url) as response:
            assert response.status == status
            assert (await response.json())["error"]

    _run(scenario)


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner), max_leaves=8
)
_FIELDS = "protocol jobUid agentId sequence seenVersion address attempt ranks progress".split()
_reports = st.fixed_dictionaries({}, optional=dict.fromkeys(_FIELDS, _json))


@settings(max_examples=40, deadline=None)
@given(reports=st.lists(st.one_of(_reports, _json), min_size=1, max_size=12), raw=st.binary(max_size=64))
def test_no_request_body_makes_the_coordinator_fail(reports: list[Any], raw: bytes) -> None:
    async def scenario(house: House) -> None:
        house.hub.publish(UID, {POD: RUN})
        async with house.session.post(house.url(), data=raw, headers=_bearer()) as response:
            assert response.status in (200, 400)
        for report in reports:
            if isinstance(report, dict):
                report = {"jobUid": UID, "agentId": "a", "sequence": 1, "address": "x", **report}
            async with house.session.post(house.url(), json=report, headers=_bearer()) as response:
                assert response.status in (200, 400, 404), await response.text()
                await response.json()

    _run(scenario, hold_seconds=0.001)
