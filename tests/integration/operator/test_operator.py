"""The whole operator process, with real kopf, against an API server: from a job to its end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from llmtrain_operator.coordinator.token import job_token
from llmtrain_operator.kube.permissions import (
    FOR_OWNER_REFERENCES,
    IN_JOB_NAMESPACES,
    IN_OWN_NAMESPACE,
    ON_NODES,
    Permission,
)
from llmtrain_operator.kube.resources import EVENTS, JOBS, LEASES, PODS, SECRETS
from tests.integration.operator.harness import (
    NAMESPACE,
    OperatorProcess,
    ScriptedAgent,
    answers,
    cluster,
    live_pods,
    manifest,
    run_pod,
    status_of,
    training,
    until,
)
from tests.support.apiserver import FakeApiServer


def _state(server: FakeApiServer, name: str = "demo") -> Any:
    return status_of(server, name).get("state")


async def _settled(server: FakeApiServer) -> int:
    """Wait until nothing was written for a second; return how many writes there were."""
    while True:
        writes = len(server.writes())
        await asyncio.sleep(1.0)
        if len(server.writes()) == writes:
            return writes


def test_a_job_runs_to_its_end_with_just_the_rights_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (server, operator):
            agents = await training(server, operator)
            first = server.writes()[0]
            assert (first.verb, first.resource) == ("patch", "llmtrainjobs/status")
            agents[1].ended(exitCode=1)
            await agents[0].started(2)
            await agents[1].started(2)
            agents[0].stepped(2)
            await until(lambda: _state(server) == "Training", "training again")
            await server.remove(PODS, NAMESPACE, agents[1].pod)
            await agents[1].stop()
            pods = await until(lambda: len(live_pods(server)) == 2 and live_pods(server), "the pod is replaced")
            await run_pod(server, pods[1])
            agents[1] = ScriptedAgent(operator, pods[1])
            for agent in agents:
                await agent.started(3)
            for agent in agents:
                agent.ended(exitCode=0)
            await until(lambda: _state(server) == "Succeeded", "success")
            for agent in agents:
                await until(lambda agent=agent: agent.order["kind"] == "exit", "told to leave")
                await agent.stop()
            await server.change(JOBS, NAMESPACE, "demo", lambda job: job["spec"].update(ttlSecondsAfterFinished=0))
            await until(lambda: server.get(JOBS, NAMESPACE, "demo") is None, "deleted after its time")
            assert server.objects(PODS) == server.objects(SECRETS) == []
            reasons = {event["reason"] for event in server.objects(EVENTS)}
            assert len(reasons) > 2, reasons
            _, metrics = await operator.ask("/metrics")
            assert 'llmtrain_failures_total{action="RestartRanks",class="Crash"} 1.0' in metrics
            assert 'llmtrain_api_requests_total{code="200",resource="llmtrainjobs/status",verb="patch"}' in metrics
            await operator.kill(signal.SIGTERM)
            _assert_rights(server)

    asyncio.run(main())


def _assert_rights(server: FakeApiServer) -> None:
    """What was asked is granted, what is granted was asked, but for what only accidents need."""
    used = {Permission(request.verb, request.group, request.resource) for request in server.requests}  # type: ignore[arg-type]
    granted = {*IN_JOB_NAMESPACES, *ON_NODES, *IN_OWN_NAMESPACE}
    assert used <= granted
    after_accidents = {Permission("get", "", "pods"), Permission("get", JOBS.group, "llmtrainjobs")}
    after_accidents |= {Permission("patch", EVENTS.group, "events"), Permission("delete", "", "pods")}
    assert granted - used <= after_accidents
    assert not {*FOR_OWNER_REFERENCES} & used


def test_a_settled_job_costs_no_write_and_only_its_pods_are_watched(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "--resync-seconds=0.5") as (server, operator):
            agents = await training(server, operator)
            writes = await _settled(server)
            for step in range(2, 8):
                agents[0].stepped(step)
                await server.change(
                    PODS, NAMESPACE, agents[0].pod, lambda pod, n=step: pod["metadata"].update(x=str(n))
                )
                await asyncio.sleep(0.2)
            assert server.writes()[writes:] == []
            watches = [
                request
                for request in server.requests
                if request.verb in ("watch", "list") and request.resource == "pods"
            ]
            assert watches
            assert all(dict(request.query)["labelSelector"] == "llmtrain.dev/job-uid" for request in watches)
            touched = {request.resource for request in server.writes()}
            assert touched == {"llmtrainjobs/status", "secrets", "pods", "events"}
            job = server.get(JOBS, NAMESPACE, "demo")
            assert job is not None
            assert not {"finalizers", "annotations"} & job["metadata"].keys()
            for agent in agents:
                await agent.stop()

    asyncio.run(main())


def test_a_healthy_job_is_written_once_per_period(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "--status-period-seconds=1.5") as (server, operator):
            agents = await training(server, operator)
            await _settled(server)
            before = len(server.writes())
            for step in range(2, 42):
                agents[0].stepped(step)
                await asyncio.sleep(0.1)
            await until(lambda: status_of(server)["progress"]["step"] == 41, "the last step is told")
            statuses = server.writes()[before:]
            assert {request.resource for request in statuses} == {"llmtrainjobs/status"}
            assert len(statuses) <= 8
            for agent in agents:
                await agent.stop()

    asyncio.run(main())


def test_an_operator_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (server, operator):
            agents = await training(server, operator)
            await operator.kill(signal.SIGKILL)
            agents[1].ended(signal=9)
            await operator.start()
            for agent in agents:
                await agent.started(2)
            agents[0].stepped(2)
            await until(lambda: _state(server) == "Training", "training again")
            status = status_of(server)
            assert (status["attempt"], status["restarts"]["total"]) == (2, 1)
            assert [pod["metadata"]["name"] for pod in live_pods(server)] == ["demo-w0-a1", "demo-w1-a1"]
            for agent in agents:
                await agent.stop()

    asyncio.run(main())


def test_a_successor_need_not_wait_for_one_that_left_and_takes_over_from_one_that_died(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path / "a", "--lease-duration-seconds=2") as (server, first):
            await until(lambda: "the coordinator listens" in first.log(), "the first leads")
            second = OperatorProcess(server, tmp_path / "b")
            await second.start("--lease-duration-seconds=2", identity="operator-1")
            await answers(second, "/readyz", 200)
            assert "this operator leads" not in second.log()
            assert await first.kill(signal.SIGTERM) == 0
            await until(lambda: "the coordinator listens" in second.log(), "the second leads")
            await second.kill(signal.SIGKILL)
            await first.start("--lease-duration-seconds=2", identity="operator-2")
            await until(lambda: _holder(server) == "operator-2", "a third takes over from the dead")
            assert await first.kill(signal.SIGTERM) == 0
            assert _holder(server) == ""

    asyncio.run(main())


def _holder(server: FakeApiServer) -> Any:
    lease = server.get(LEASES, "default", "llmtrain-operator")
    return lease["spec"].get("holderIdentity") if lease else None


def test_an_operator_that_lost_its_lease_to_another_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "--lease-duration-seconds=2") as (server, operator):
            await until(lambda: "the coordinator listens" in operator.log(), "it leads")
            thief = {"holderIdentity": "thief", "leaseDurationSeconds": 60}
            await server.change(LEASES, "default", "llmtrain-operator", lambda lease: lease["spec"].update(thief))
            assert operator.process is not None
            assert await asyncio.wait_for(operator.process.wait(), 30) == 1
            assert "thief" in operator.log()

    asyncio.run(main())


def test_objects_that_make_no_sense_are_told_so_and_other_jobs_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, "--resync-seconds=1") as (server, operator):
            for number, spec in enumerate(
                ({"training": {"steps": "many"}}, {"workers": None}, {"modle": 1}, {"data": []})
            ):
                bad = manifest(f"bad-{number}")
                bad["spec"] |= spec
                await server.put(JOBS, bad)
            await server.put(JOBS, {**manifest("empty"), "spec": None})
            await server.put(JOBS, {"metadata": {"name": "bare", "namespace": NAMESPACE}})
            await server.put(JOBS, {**manifest("odd"), "status": {"attempt": "x"}})
            await server.put(PODS, _stranger())
            huge = manifest("huge", model={"preset": "llama-8b"}, parallelism={"planFor": "cpu"})
            await server.put(JOBS, huge)
            await server.put(JOBS, manifest("good", parallelism={"planFor": "cpu"}))
            await until(lambda: len(live_pods(server, "good")) == 2, "the good job has its pods")
            for name in ("bad-0", "bad-1", "bad-2", "bad-3", "empty", "bare", "huge"):
                await until(lambda name=name: _state(server, name) == "Blocked", f"{name} is told what is wrong")
            assert status_of(server, "odd") == {"attempt": "x"}
            assert "spec.training.steps" in status_of(server, "bad-0")["message"]
            assert "spec.parallelism.planFor: no layout fits cpu" in status_of(server, "huge")["message"]
            assert live_pods(server, "huge") == []
            assert status_of(server, "good")["shape"]["zeroStage"] == 1, "the planner chose it"
            assert server.get(PODS, NAMESPACE, "stranger") is not None
            assert operator.process is not None and operator.process.returncode is None
            assert "Traceback" not in operator.log()

    asyncio.run(main())


def _stranger() -> dict[str, Any]:
    """Somebody's pod that wears our labels."""
    labels = {"llmtrain.dev/job-uid": "nobody", "llmtrain.dev/job": "good", "llmtrain.dev/worker": "x"}
    return {"metadata": {"name": "stranger", "namespace": NAMESPACE, "labels": labels}, "spec": {}}


@pytest.mark.parametrize("name", ["demo-w0-a1", "demo-w0-a7"], ids=["the name is taken", "it may still write"])
def test_a_job_applied_anew_under_its_old_name_waits_for_the_old_pods_and_gets_its_own(
    name: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (server, operator):
            agents = await training(server, operator)
            old = {pod["metadata"]["uid"] for pod in live_pods(server)}
            leftover = server.get(PODS, NAMESPACE, agents[0].pod)
            assert leftover is not None
            await server.remove(JOBS, NAMESPACE, "demo")
            for agent in agents:
                await agent.stop()
            leftover["metadata"].update(name=name, uid="leftover")
            await server.put(PODS, leftover)  # its node is slow to end it
            await server.put(JOBS, manifest())
            await until(lambda: "has not ended" in str(server.objects(EVENTS)), "it says why it waits")
            kept = server.objects(PODS)
            assert [pod["metadata"]["uid"] for pod in kept] == ["leftover"]
            assert kept[0]["metadata"]["labels"] == leftover["metadata"]["labels"]
            await server.remove(PODS, NAMESPACE, name)
            pods = await until(lambda: len(live_pods(server)) == 2 and live_pods(server), "both pods")
            assert not old & {pod["metadata"]["uid"] for pod in pods}
            job = server.get(JOBS, NAMESPACE, "demo")
            assert job is not None
            assert {pod["metadata"]["labels"]["llmtrain.dev/job-uid"] for pod in pods} == {job["metadata"]["uid"]}

    asyncio.run(main())


def test_workers_are_brought_the_new_token_when_the_operators_key_was_changed(tmp_path: Path) -> None:
    new_key = bytes(range(1, 33))

    async def main() -> None:
        async with cluster(tmp_path) as (server, operator):
            agents = await training(server, operator)
            job = server.get(JOBS, NAMESPACE, "demo")
            assert job is not None
            await operator.kill(signal.SIGTERM)
            await operator.start(key=new_key)
            token = job_token(new_key, job["metadata"]["uid"])
            await until(
                lambda: [s["stringData"]["token"] for s in server.objects(SECRETS)] == [token], "the Secret is renewed"
            )
            written = [request for request in server.writes() if request.resource == "secrets"]
            await asyncio.sleep(1.0)  # the old token is refused many times meanwhile
            assert [request for request in server.writes() if request.resource == "secrets"] == written
            assert len(live_pods(server)) == 2
            for agent in agents:
                await agent.stop()

    asyncio.run(main())


def test_namespaces_that_are_not_watched_are_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, f"--namespaces={NAMESPACE},other") as (server, _):
            elsewhere = manifest("elsewhere")
            elsewhere["metadata"]["namespace"] = "foreign"
            await server.put(JOBS, elsewhere)
            await until(lambda: any(r.verb == "watch" and r.namespace == "other" for r in server.requests), "watching")
            await server.put(JOBS, manifest("mine"))
            await until(lambda: len(live_pods(server, "mine")) == 2, "pods in the watched namespace")
            asked = {request.namespace for request in server.requests if request.resource != LEASES.plural}
            assert asked == {NAMESPACE, "other"}

    asyncio.run(main())


def test_the_probes_tell_how_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path, start=False) as (server, operator):
            await server.stop()
            await operator.start()
            await answers(operator, "/readyz", 503)
            await answers(operator, "/healthz", 200)
            await server.start()
            await answers(operator, "/readyz", 200)
            _, metrics = await operator.ask("/metrics")
            for name in ("llmtrain_queue_oldest_seconds", "llmtrain_agents_silent", "llmtrain_build_info"):
                assert f"\n{name}" in metrics
            assert "\nllmtrain_watching 1.0" in metrics
            age = next(line for line in metrics.splitlines() if line.startswith("llmtrain_watch_age_seconds "))
            assert 0 <= float(age.split()[1]) < 60

    asyncio.run(main())
