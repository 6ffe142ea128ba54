"""One look at one job: what is done, in which order, and what is not done when something fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from llmtrain_api.constants import ConditionType, State
from llmtrain_api.job import LLMTrainJob, Metadata
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.sync import Order
from llmtrain_operator.coordinator.hub import Hub
from llmtrain_operator.core.actions import CreateWorker, DeleteWorker, Event, Plan
from llmtrain_operator.core.observed import Observed, Worker
from llmtrain_operator.core.plan import plan
from llmtrain_operator.runtime.backend import BackendError, JobKey
from llmtrain_operator.runtime.reconciler import Decisions, Reconciler, Result
from llmtrain_operator.runtime.workqueue import RetryLaterError
from tests.support.jobs import JobBuilder

KEY = JobKey("lab", "demo")
NOW = 1_800_000_000.0


class Recorder:
    """A backend in memory that notes what is done to it, and fails where told to; also the listener."""

    def __init__(self, *manifests: dict[str, Any]) -> None:
        self.jobs = {JobKey(m["metadata"]["namespace"], m["metadata"]["name"]): m for m in manifests}
        self.pods: list[Worker] = []
        self.done: list[str] = []
        self.fails: dict[str, BackendError] = {}

    def job_manifest(self, key: JobKey) -> dict[str, Any] | None:
        return self.jobs.get(key)

    def job_keys(self) -> Sequence[JobKey]:
        return list(self.jobs)

    def workers(self, job: LLMTrainJob) -> Sequence[Worker]:
        return self.pods

    async def write_status(self, metadata: Metadata, status: LLMTrainJobStatus) -> None:
        await self._do("status", metadata.name)
        self.jobs[JobKey(metadata.namespace, metadata.name)]["status"] = status.to_wire()

    async def create_worker(self, job: LLMTrainJob, worker: CreateWorker) -> None:
        await self._do("create", worker.name)

    async def delete_worker(self, job: LLMTrainJob, worker: DeleteWorker) -> None:
        await self._do("delete", worker.name)

    async def delete_job(self, job: LLMTrainJob) -> None:
        await self._do("delete job", job.metadata.name)

    async def emit_event(self, job: LLMTrainJob, event: Event) -> None:
        await self._do("event", event.reason)

    def reconciled(self, result: Result, seconds: float) -> None: ...

    def decided(self, key: JobKey, before: LLMTrainJobStatus, plan: Plan) -> None:
        self.done.append("decided")

    def forgotten(self, key: JobKey) -> None:
        self.done.append(f"forgotten {key.name}")

    def unreadable(self, key: JobKey) -> None:
        self.done.append(f"unreadable {key.name}")

    async def _do(self, what: str, name: str) -> None:
        await asyncio.sleep(0)
        error = self.fails.get(what) or self.fails.get(f"{what} {name}")
        if error is not None:
            raise error
        self.done.append(f"{what} {name}")


def _manifest(name: str = "demo", **metadata: Any) -> dict[str, Any]:
    return JobBuilder(name).with_metadata(**metadata).build().to_wire()


def _reconciler(backend: Recorder, decide: Any = plan) -> tuple[Reconciler, Hub, list[JobKey]]:
    woken: list[JobKey] = []
    hub = Hub(woken.append)
    decisions = Decisions(decide, lambda job: ())
    return (
        Reconciler(backend, hub, decisions, enqueue=woken.append, listener=backend, clock=lambda: NOW),
        hub,
        woken,
    )


def _everything(observed: Observed) -> Plan:
    return Plan(
        status=observed.job.status.model_copy(update={"attempt": 2}),
        status_changed=True,
        delete=(DeleteWorker("old", "u"),),
        create=(CreateWorker("new-0", 0, 2), CreateWorker("new-1", 1, 2)),
        orders={"new-0": Order(kind="wait", attempt=2)},
        events=(Event("Normal", "Restarted", "again"),),
        delete_job=True,
        requeue_after=9.0,
    )


def test_the_status_is_durable_before_anything_is_touched() -> None:
    async def main() -> None:
        backend = Recorder(_manifest())
        reconciler, hub, _ = _reconciler(backend, _everything)
        assert await reconciler.reconcile(KEY) == 9.0
        order = [
            "status demo",
            "decided",
            "delete old",
            "create new-0",
            "create new-1",
            "event Restarted",
            "delete job demo",
        ]
        assert backend.done == order
        assert hub.uid_of(KEY) == "uid-demo"

    asyncio.run(main())


def test_agents_need_not_wait_while_a_layout_is_chosen() -> None:
    async def main() -> None:
        manifest = JobBuilder("demo").with_spec(parallelism={"planFor": "cpu"}).build().to_wire()
        answered = threading.Event()

        def slowly(observed: Observed) -> Plan:
            assert answered.wait(60), "the event loop stands still"
            return _everything(observed)

        reconciler, _, _ = _reconciler(Recorder(manifest), slowly)
        looking = asyncio.create_task(reconciler.reconcile(KEY))
        await asyncio.sleep(0)
        answered.set()
        assert await looking == 9.0

    asyncio.run(main())


def test_nothing_is_touched_when_the_status_cannot_be_written() -> None:
    async def main() -> None:
        backend = Recorder(_manifest())
        backend.fails["status"] = BackendError("throttled", 7.0)
        reconciler, _, _ = _reconciler(backend, _everything)
        with pytest.raises(RetryLaterError) as failed:
            await reconciler.reconcile(KEY)
        assert failed.value.not_before == 7.0
        assert backend.done == []

    asyncio.run(main())


def test_a_write_that_fails_keeps_no_other_from_happening_and_is_told() -> None:
    async def main() -> None:
        backend = Recorder(_manifest())
        backend.fails = {"delete": BackendError("no"), "create new-0": BackendError("quota exceeded", 3.0)}
        reconciler, _, _ = _reconciler(backend, _everything)
        with pytest.raises(RetryLaterError) as failed:
            await reconciler.reconcile(KEY)
        assert failed.value.not_before == 3.0
        assert "delete job demo" not in backend.done
        assert backend.done == [
            "status demo",
            "decided",
            "create new-1",
            "event Restarted",
            "event WriteFailed",
            "event WriteFailed",
        ]

    asyncio.run(main())


def test_a_lost_event_is_no_failure() -> None:
    async def main() -> None:
        backend = Recorder(_manifest())
        backend.fails["event"] = BackendError("no")
        reconciler, _, _ = _reconciler(backend, _everything)
        assert await reconciler.reconcile(KEY) == 9.0

    asyncio.run(main())


def test_a_second_look_at_a_job_that_waits_writes_nothing() -> None:
    async def main() -> None:
        backend = Recorder(_manifest())
        reconciler, _, _ = _reconciler(backend)
        await reconciler.reconcile(KEY)
        assert backend.done[0] == "status demo"
        names = [entry.removeprefix("create ") for entry in backend.done if entry.startswith("create ")]
        backend.pods = [Worker(name, f"u{i}", i, 1, 2, "Pending", NOW) for i, name in enumerate(names)]
        backend.done.clear()
        await reconciler.reconcile(KEY)
        await reconciler.reconcile(KEY)
        assert [entry for entry in backend.done if not entry.startswith("status")] == ["decided", "decided"]
        assert backend.done.count("status demo") <= 1

    asyncio.run(main())


def test_a_job_that_is_gone_is_forgotten_and_its_agents_sent_away() -> None:
    async def main() -> None:
        backend = Recorder(_manifest())
        reconciler, hub, _ = _reconciler(backend)
        reconciler.admit_all()
        assert hub.uid_of(KEY) == "uid-demo"
        backend.jobs.clear()
        assert await reconciler.reconcile(KEY) is None
        assert hub.uid_of(KEY) is None
        assert backend.done == ["forgotten demo"]

    asyncio.run(main())


@pytest.mark.parametrize("end", ["deleted", "finished"])
def test_of_two_jobs_with_one_store_the_younger_waits_for_the_end_of_the_older(end: str) -> None:
    async def main() -> None:
        older = _manifest("older", creationTimestamp="2026-01-01T00:00:00Z")
        younger = _manifest("younger", creationTimestamp="2026-01-02T00:00:00Z")
        older["spec"]["checkpoint"]["store"] = "pvc://checkpoints/shared"
        younger["spec"]["checkpoint"]["store"] = "pvc://checkpoints/shared/"
        backend = Recorder(older, younger)
        reconciler, _, woken = _reconciler(backend)
        await reconciler.reconcile(JobKey("lab", "younger"))
        assert backend.jobs[JobKey("lab", "younger")]["status"]["state"] == State.BLOCKED
        assert "lab/older" in backend.jobs[JobKey("lab", "younger")]["status"]["message"]
        await reconciler.reconcile(JobKey("lab", "older"))
        assert backend.jobs[JobKey("lab", "older")]["status"]["state"] == State.PENDING
        assert woken == []
        if end == "deleted":
            del backend.jobs[JobKey("lab", "older")]
        else:
            backend.jobs[JobKey("lab", "older")]["status"]["state"] = "Succeeded"
        await reconciler.reconcile(JobKey("lab", "older"))
        assert woken == [JobKey("lab", "younger")]
        await reconciler.reconcile(JobKey("lab", "younger"))
        assert backend.jobs[JobKey("lab", "younger")]["status"]["state"] == State.PENDING

    asyncio.run(main())


def _broken(**spec: Any) -> dict[str, Any]:
    manifest = _manifest()
    manifest["spec"] |= spec
    return manifest


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        (_broken(training={"steps": "many"}), "spec.training.steps"),
        (_broken(modle={}), "spec.modle"),
        (_broken(workers=None), "spec.workers"),
        ({**_manifest(), "spec": None}, "spec"),
        ({k: v for k, v in _manifest().items() if k != "spec"}, "spec"),
    ],
    ids=["wrong type", "unknown field", "null", "no mapping", "no spec"],
)
def test_an_object_that_cannot_be_read_is_told_so_once_and_left_alone(manifest: dict[str, Any], named: str) -> None:
    async def main() -> None:
        backend = Recorder({**manifest, "status": {"attempt": 4}})
        reconciler, _, _ = _reconciler(backend)
        assert await reconciler.reconcile(KEY) is None
        status = LLMTrainJobStatus.model_validate(backend.jobs[KEY]["status"])
        accepted = status.condition(ConditionType.ACCEPTED)
        assert accepted is not None and accepted.status == "False" and named in accepted.message
        assert (status.attempt, status.state) == (4, State.BLOCKED)
        await reconciler.reconcile(KEY)
        assert backend.done == ["unreadable demo", "status demo", "unreadable demo"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "manifest",
    [
        {**_manifest(), "status": {"attempt": "four"}},
        {**_broken(modle={}), "status": {"state": "Succeeded"}},
        _broken(modle={}, managedBy="example.org/other"),
    ],
    ids=["its status cannot be read", "it has finished", "it is another operator's"],
)
def test_an_object_that_cannot_be_read_keeps_its_status(manifest: dict[str, Any]) -> None:
    async def main() -> None:
        backend = Recorder(manifest)
        reconciler, _, _ = _reconciler(backend)
        assert await reconciler.reconcile(KEY) is None
        assert backend.done == ["unreadable demo"]

    asyncio.run(main())
