"""Nonsense at the coordinator: always a readable refusal, never a failure of the process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain_api.sync import MAX_BODY_BYTES
from tests.unit.operator.coordinator.house import POD, RUN, UID, House, bearer, run_scenario


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
        (b'{"jobUid": "u", "agentId": "a", "sequence": 1, "address": "x", "attempt": 2147483648}', 400, "attempt"),
        (
            b'{"jobUid": "u", "agentId": "a", "sequence": 1, "address": "x", "ranks": '
            b'[{"localRank": 0, "globalRank": 0, "pid": 1, "state": "exited", "exitedAt": NaN}]}',
            400,
            "ranks.0.exitedAt",
        ),
        (b"\xff\xfe", 400, "body"),
        (b"[" * 100_000, 400, "body"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "bytes"),
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "negative",
        "missing",
        "rank",
        "protocol",
        "attempt",
        "not finite",
        "not utf-8",
        "deep",
        "too long",
    ],
)
def test_a_malformed_report_is_refused_and_the_field_is_named(body: bytes, status: int, named: str) -> None:
    async def scenario(house: House) -> None:
        async with house.session.post(house.url(), data=body, headers=bearer()) as response:
            answer = await response.json()
        assert response.status == status
        assert named in answer["error"]
        assert house.hub.agents(UID) == {}

    run_scenario(scenario)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("GET", None, 405), ("PUT", "/v1", 404)])
def test_other_requests_get_a_readable_refusal(method: str, path: str | None, status: int) -> None:
    async def scenario(house: House) -> None:
        url = house.url() if path is None else f"http://127.0.0.1:{house.server.port}{path}"
        async with house.session.request(method, url) as response:
            assert response.status == status
            assert (await response.json())["error"]

    run_scenario(scenario)


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
        async with house.session.post(house.url(), data=raw, headers=bearer()) as response:
            assert response.status in (200, 400)
        for report in reports:
            if isinstance(report, dict):
                report = {"jobUid": UID, "agentId": "a", "sequence": 1, "address": "x", **report}
            async with house.session.post(house.url(), json=report, headers=bearer()) as response:
                assert response.status in (200, 400, 404), await response.text()
                await response.json()

    run_scenario(scenario, hold_seconds=0.001)
