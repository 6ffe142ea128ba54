"""The API server misbehaves in every way it can: the operator always gets there, and never by doing a thing twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain_operator.kube.resources import JOBS, PODS
from tests.integration.operator.harness import (
    NAMESPACE,
    cluster,
    live_pods,
    manifest,
    status_of,
    training,
    until,
)
from tests.support.apiserver import FakeApiServer, Fault, Request


def _is(verb: str, resource: str) -> Callable[[Request], bool]:
    return lambda request: (request.verb, request.resource) == (verb, resource)


def _verb(verb: str) -> Callable[[Request], bool]:
    return lambda request: request.verb == verb


STATUS, POD, SECRET, EVENT = (
    _is("patch", "llmtrainjobs/status"),
    _is("create", "pods"),
    _is("patch", "secrets"),
    _is("create", "events"),
)

JOB_FAULTS = {
    "status: conflict": Fault(STATUS, 409, times=2),
    "status: throttled": Fault(STATUS, 429, times=2, retry_after=0.3),
    "status: throttled without a time": Fault(STATUS, 429),
    "status: server error": Fault(STATUS, 500, times=3),
    "status: unavailable": Fault(STATUS, 503, times=2, retry_after=0.2),
    "status: connection dropped": Fault(STATUS, "drop", times=2),
    "status: done but never answered": Fault(STATUS, "lost"),
    "pods: throttled": Fault(POD, 429, times=3, retry_after=0.3),
    "pods: server error": Fault(POD, 500, times=3),
    "pods: gateway timeout": Fault(POD, 504),
    "pods: quota for a while": Fault(POD, 403, times=2),
    "pods: connection dropped": Fault(POD, "drop", times=3),
    "pods: done but never answered": Fault(POD, "lost", times=2),
    "secret: server error": Fault(SECRET, 500, times=2),
    "secret: connection dropped": Fault(SECRET, "drop", times=2),
    "events: lost": Fault(EVENT, 500),
}
STARTUP_FAULTS = {
    "lists: server error": Fault(_verb("list"), 500, times=4),
    "lists: gone": Fault(_verb("list"), 410, times=2),
    "watches: server error": Fault(_verb("watch"), 500, times=4),
    "watches: throttled": Fault(_verb("watch"), 429, retry_after=1),
    "watches: dropped": Fault(_verb("watch"), "drop", times=4),
    "lease: conflict": Fault(_is("update", "leases"), 409, times=2),
    "lease: server error": Fault(lambda request: request.resource == "leases", 500, times=3),
}


async def _runs(server: FakeApiServer, name: str) -> None:
    """Wait until the job has what it needs, and no more."""
    await until(lambda: len(live_pods(server, name)) == 2, f"{name}: two pods")
    await until(lambda: status_of(server, name).get("attempt") == 1, f"{name}: the first attempt in the status")
    assert [pod["metadata"]["name"] for pod in live_pods(server, name)] == [f"{name}-w0-a1", f"{name}-w1-a1"]


def test_a_job_gets_its_pods_once_whatever_write_fails(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (server, operator):
            for number, (name, fault) in enumerate(JOB_FAULTS.items()):
                server.inject(fault)
                await server.put(JOBS, manifest(f"job-{number}"))
                await _runs(server, f"job-{number}")
                await until(lambda fault=fault: fault.hits == fault.times, f"{name} was met")
            assert len(server.objects(PODS)) == 2 * len(JOB_FAULTS)
            assert operator.process is not None and operator.process.returncode is None

    asyncio.run(main())


def test_an_operator_comes_up_whatever_read_fails_and_sees_jobs_that_come_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, start=False) as (server, operator):
            for fault in STARTUP_FAULTS.values():
                server.inject(fault)
            await server.put(JOBS, manifest("before"))
            await operator.start()
            await _runs(server, "before")
            for name, fault in STARTUP_FAULTS.items():
                await until(lambda fault=fault: fault.hits == fault.times, f"{name} was met")
            await server.put(JOBS, manifest("after"))
            await _runs(server, "after")
            assert operator.process is not None and operator.process.returncode is None

    asyncio.run(main())


def test_killed_between_status_and_pods_the_next_operator_goes_on_from_the_status(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, start=False) as (server, operator):
            held = server.inject(Fault(POD, "hang", times=1000))
            await operator.start()
            await server.put(JOBS, manifest())
            await until(lambda: held.hits == 2, "both pods are being created")
            assert status_of(server)["attempt"] == 1
            await operator.kill(signal.SIGKILL)
            held.times = 0
            held.released.set()
            assert server.objects(PODS) == []
            await operator.start()
            await until(lambda: len(live_pods(server)) == 2, "two pods")
            assert status_of(server)["attempt"] == 1
            assert {pod["metadata"]["name"] for pod in server.objects(PODS)} == {"demo-w0-a1", "demo-w1-a1"}

    asyncio.run(main())


@pytest.mark.parametrize("way", ["history lost", "watches ended", "kopf's watch gets an error"])
def test_a_deletion_that_no_watch_tells_is_found_and_the_pod_replaced(way: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (server, operator):
            agents = await training(server, operator)
            await until(
                lambda: any(_is("watch", "pods")(request) for request in server.requests), "the pods are watched"
            )
            refused = server.inject(
                Fault(lambda r: r.verb in ("watch", "list") and r.resource == "pods", 503, times=1000)
            )
            if way == "history lost":
                await server.compact()
            elif way == "watches ended":
                server.end_watches()
            else:
                await server.tell_error(PODS)
            await until(lambda: refused.hits, "the watch is refused")
            await server.remove(PODS, NAMESPACE, agents[1].pod, silently=True)
            await agents[1].stop()
            refused.times = 0
            if way == "watches ended":
                await server.compact()  # else the watch goes on from where it was, and nothing was lost
            await until(lambda: status_of(server)["attempt"] == 2, "the next attempt")
            names = await until(
                lambda: len(live_pods(server)) == 2 and [p["metadata"]["name"] for p in live_pods(server)], "two pods"
            )
            assert names == ["demo-w0-a1", "demo-w1-a2"]
            if way == "kopf's watch gets an error":
                await until(lambda: "the watches ended" in operator.log(), "the watches are started anew")
            await agents[0].stop()

    asyncio.run(main())


def test_an_outage_of_the_api_server_changes_nothing_and_the_status_catches_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "--status-period-seconds=0.5", "--lease-duration-seconds=2") as (server, operator):
            agents = await training(server, operator)
            await server.stop()
            writes = len(server.writes())
            agents[0].stepped(50, checkpoint_step=40)
            await asyncio.sleep(4)  # longer than the lease lives
            assert len(server.writes()) == writes
            assert operator.process is not None and operator.process.returncode is None
            assert (await operator.ask("/healthz"))[0] == 200
            await server.start()
            await until(lambda: status_of(server)["checkpoint"]["lastGoodStep"] == 40, "the status has caught up")
            assert status_of(server)["attempt"] == 1
            assert [pod["metadata"]["name"] for pod in live_pods(server)] == ["demo-w0-a1", "demo-w1-a1"]
            for agent in agents:
                await agent.stop()

    asyncio.run(main())


def test_a_pod_deleted_while_the_api_server_comes_back_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (server, operator):
            agents = await training(server, operator)
            await server.stop()
            await server.remove(PODS, NAMESPACE, agents[1].pod)
            await agents[1].stop()
            await server.start()
            await until(lambda: len(live_pods(server)) == 2, "two pods")
            assert status_of(server)["attempt"] == 2
            await agents[0].stop()

    asyncio.run(main())
