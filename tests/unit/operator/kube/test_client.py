"""The client's coroutines over real HTTP: typed errors, preconditions, and what apply removes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes import client as official

from llmtrain_operator.kube import errors
from llmtrain_operator.kube.client import Call, DeleteOptions, KubeClient
from llmtrain_operator.kube.resources import JOBS, PODS
from tests.support.apiserver import FakeApiServer, Fault, fake_api_server


def _run(
    scenario: Callable[[FakeApiServer, KubeClient], Awaitable[None]], seen: list[tuple[str, int]] | None = None
) -> None:
    def observe(call: Call, code: int) -> None:
        if seen is not None:
            seen.append((call.verb, code))

    async def main() -> None:
        async with asyncio.timeout(60), fake_api_server() as server:
            configuration = official.Configuration(host=server.url)
            configuration.retries = False
            client = KubeClient(configuration, observe)
            try:
                await scenario(server, client)
            finally:
                client.close()

    asyncio.run(main())


def _job(**fields: Any) -> dict[str, Any]:
    return {"apiVersion": JOBS.api_version, "kind": JOBS.kind, "metadata": {"name": "a", "namespace": "lab"}, **fields}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (400, errors.InvalidError),
        (401, errors.ForbiddenError),
        (403, errors.ForbiddenError),
        (404, errors.NotFoundError),
        (409, errors.ConflictError),
        (410, errors.GoneError),
        (422, errors.InvalidError),
        (429, errors.ThrottledError),
        (500, errors.ServerError),
        (503, errors.ServerError),
        ("drop", errors.UnreachableError),
    ],
    ids=str,
)
def test_every_failure_has_its_type_and_tells_when_to_come_again(kind: int | str, expected: type[Exception]) -> None:
    seen: list[tuple[str, int]] = []

    async def scenario(server: FakeApiServer, client: KubeClient) -> None:
        server.inject(Fault(lambda request: True, kind, retry_after=7))
        with pytest.raises(errors.ApiError) as caught:
            await client.get(JOBS, "lab", "a")
        assert type(caught.value) is expected
        code = kind if isinstance(kind, int) else 0
        assert caught.value.status == code
        assert caught.value.retry_after == (7 if code else None)
        assert seen == [("get", code)]

    _run(scenario, seen)


def test_apply_removes_what_this_manager_applied_before_and_leaves_what_others_did() -> None:
    async def scenario(server: FakeApiServer, client: KubeClient) -> None:
        await server.put(JOBS, _job(spec={"theirs": 1}, status={"foreign": True}))
        for status in ({"attempt": 1, "progress": {"step": 1, "loss": "2"}}, {"attempt": 2, "progress": {"step": 2}}):
            job = await client.apply(JOBS, _job(status=status), manager="m", subresource="status")
        assert job["status"] == {"attempt": 2, "progress": {"step": 2}, "foreign": True}
        assert job["spec"] == {"theirs": 1}

    _run(scenario)


def test_apply_with_an_old_version_is_a_conflict() -> None:
    async def scenario(server: FakeApiServer, client: KubeClient) -> None:
        old = await server.put(JOBS, _job(spec={}))
        await server.change(JOBS, "lab", "a", lambda job: job.update(spec={"x": 1}))
        body = _job(status={"attempt": 1})
        body["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        with pytest.raises(errors.ConflictError):
            await client.apply(JOBS, body, subresource="status")

    _run(scenario)


def test_another_object_of_the_same_name_is_not_deleted() -> None:
    async def scenario(server: FakeApiServer, client: KubeClient) -> None:
        pod = await server.put(PODS, {"metadata": {"name": "p", "namespace": "lab"}, "spec": {"nodeName": "n"}})
        with pytest.raises(errors.ConflictError):
            await client.delete(PODS, "lab", "p", DeleteOptions(uid="another"))
        last = await client.delete(PODS, "lab", "p", DeleteOptions(uid=pod["metadata"]["uid"]))
        assert last["metadata"]["deletionTimestamp"]
        await client.delete(PODS, "lab", "p", DeleteOptions(uid=pod["metadata"]["uid"], grace_seconds=0))
        assert server.objects(PODS) == []

    _run(scenario)


def test_a_list_is_of_one_namespace_or_of_all_and_has_a_version() -> None:
    async def scenario(server: FakeApiServer, client: KubeClient) -> None:
        for namespace in ("lab", "lab", "other"):
            name = f"p{len(server.objects(PODS))}"
            await server.put(PODS, {"metadata": {"name": name, "namespace": namespace, "labels": {"x": "1"}}})
        assert [len((await client.list(PODS, ns))[0]) for ns in (None, "lab", "none")] == [3, 2, 0]
        assert len((await client.list(PODS, None, "y"))[0]) == 0
        assert (await client.list(PODS, "lab", "x"))[1] == "3"

    _run(scenario)


def test_a_message_of_any_characters_can_be_applied() -> None:
    async def scenario(server: FakeApiServer, client: KubeClient) -> None:
        await server.put(JOBS, _job())
        message = "out of luck \U0001f600 \x1b[31mred\x1b[0m \x00 \u2028 caf\udce9"
        job = await client.apply(JOBS, _job(status={"message": message}), manager="m", subresource="status")
        assert job["status"]["message"] == message.replace("\udce9", "\ufffd")

    _run(scenario)
