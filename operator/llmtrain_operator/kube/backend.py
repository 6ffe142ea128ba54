"""The cluster as a backend: reads come from caches that watches feed, writes go to the API server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from llmtrain_api.constants import API_VERSION, KIND, LABEL_JOB_UID, MANAGER
from llmtrain_api.job import LLMTrainJob, Metadata
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.coordinator.token import job_token
from llmtrain_operator.core.actions import CreateWorker, DeleteWorker, Event
from llmtrain_operator.core.objects import token_secret
from llmtrain_operator.core.observed import Worker
from llmtrain_operator.core.worker_pod import PodSettings, build_pod
from llmtrain_operator.kube.cache import ObjectCache
from llmtrain_operator.kube.client import DeleteOptions, KubeClient
from llmtrain_operator.kube.errors import ConflictError, NotFoundError
from llmtrain_operator.kube.events import EventRecorder
from llmtrain_operator.kube.nodes import hardware, lost
from llmtrain_operator.kube.resources import JOBS, NODES, PODS, SECRETS, Resource
from llmtrain_operator.kube.translate import NodeNews, belongs_to, job_of, node_of, to_worker, trouble
from llmtrain_operator.runtime.backend import JobKey

logger = logging.getLogger(__name__)

Object = dict[str, Any]

STATUS_MANAGER = f"{MANAGER}-status"
POD_SELECTOR = LABEL_JOB_UID
"""Label selector (the label exists) of all pods that are anybody's worker."""
SECRET_TRUSTED_SECONDS = 30.0
"""A token's Secret applied this recently need not be applied again; somebody may delete it any time."""
NAME_TAKEN_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class KubeOptions:
    """What the backend must know of its operator."""

    key: bytes
    """Makes the jobs' tokens."""
    pods: PodSettings
    instance: str
    """Name of this operator's pod, shown in events."""
    namespaces: tuple[str, ...] = ()
    """Empty: all."""


class KubeBackend:
    """Implements runtime.backend.Backend. All methods belong to one event loop."""

    def __init__(self, client: KubeClient, options: KubeOptions, enqueue: Callable[[JobKey], None]) -> None:
        self._client = client
        self._options = options
        self._enqueue = enqueue
        self._events = EventRecorder(client, options.instance)
        self._jobs = ObjectCache(self._job_changed)
        self._pods = ObjectCache(self._pod_changed, group_by=lambda pod: str(job_of(pod)))
        self._nodes = ObjectCache(self._node_changed)
        self._node_news: dict[str, NodeNews] = {}
        """Name of a node to what it last said."""
        self._troubled_since: dict[str, float] = {}
        """Uid of a pod whose container cannot start to when that was first seen."""
        self._secrets: dict[str, tuple[float, asyncio.Task[None]]] = {}
        """Uid of a job to when its Secret was last applied, and that write."""
        self._renewing: set[asyncio.Future[None]] = set()

    # ---- what feeds the caches

    def feed(self, resource: Resource, event_type: str | None, obj: Object) -> None:
        """Take in one watch event of a job, a pod or a node."""
        cache = {JOBS: self._jobs, PODS: self._pods, NODES: self._nodes}[resource]
        if event_type == "DELETED":
            cache.gone(obj)
        else:
            cache.put(obj)

    async def resync(self) -> int:
        """List everything anew and repair the caches; return how many objects were not known as they are.

        A watch that had to start over (410 Gone) never tells what was deleted meanwhile: only a list does.

        Raises:
            ApiError: a list failed; the caches are as before or partly repaired.
        """
        repaired = 0
        for namespace in self._options.namespaces or (None,):
            jobs, version = await self._client.list(JOBS, namespace)
            repaired += self._jobs.replace(jobs, version, namespace)
            pods, version = await self._client.list(PODS, namespace, POD_SELECTOR)
            repaired += self._pods.replace(pods, version, namespace)
        if not self._options.namespaces:
            nodes, version = await self._client.list(NODES, None)
            repaired += self._nodes.replace(nodes, version, None)
        return repaired

    # ---- reads

    def job_manifest(self, key: JobKey) -> Object | None:
        return self._jobs.get(key.namespace, key.name)

    def job_keys(self) -> Sequence[JobKey]:
        return [_key_of(job) for job in self._jobs]

    def workers(self, job: LLMTrainJob) -> Sequence[Worker]:
        pods = [pod for pod in self._pods.group(str(_key_of_job(job))) if belongs_to(pod, job.metadata.uid)]
        workers = [
            to_worker(pod, self._troubled_since.get(pod["metadata"]["uid"]), self._news_of(node_of(pod)))
            for pod in pods
        ]
        return [worker for worker in workers if worker is not None]

    # ---- writes

    async def write_status(self, metadata: Metadata, status: LLMTrainJobStatus) -> None:
        """Apply the whole status, on the condition that the job is still the one it was decided for.

        Raises:
            ConflictError: the job changed meanwhile (or another operator wrote); the cache has the new state.
        """
        body: Object = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": metadata.name,
                "namespace": metadata.namespace,
                # No version belongs to two objects, so this is the condition for the uid too, which /status ignores.
                "resourceVersion": metadata.resource_version,
            },
            "status": status.to_wire(),
        }
        try:
            written = await self._client.apply(JOBS, body, manager=STATUS_MANAGER, subresource="status")
        except ConflictError:
            await self._refresh_job(metadata)
            raise
        except NotFoundError:
            self._jobs.gone({"metadata": metadata.to_wire()})
            raise
        self._jobs.put(written)

    async def create_worker(self, job: LLMTrainJob, worker: CreateWorker) -> None:
        """Create the pod, its job's Secret first. A pod of that name that is the job's own is as good.

        A plain create, not an apply: applying over a terminating pod of a deleted job of the same name would adopt it.

        Raises:
            ConflictError: a pod of a deleted job of the same name still runs, and may write to the same checkpoints.
        """
        leftover = self._leftover(job)
        if leftover:
            reason = f"pod {leftover} of a deleted job of the same name has not ended, and may still write checkpoints"
            raise ConflictError(f"create pod {worker.name}: {reason}", 409, NAME_TAKEN_RETRY_SECONDS)
        await self._ensure_secret(job)
        try:
            created = await self._client.create(PODS, build_pod(job, worker, self._options.pods))
        except ConflictError:
            created = await self._client.get(PODS, job.metadata.namespace, worker.name)
            if not belongs_to(created, job.metadata.uid):
                owner = "another owner's pod has this name; if it is a leftover it will be gone soon"
                raise ConflictError(f"create pod {worker.name}: {owner}", 409, NAME_TAKEN_RETRY_SECONDS) from None
        self._pods.put(created)

    async def delete_worker(self, job: LLMTrainJob, worker: DeleteWorker) -> None:
        namespace = job.metadata.namespace
        gone: Object = {"metadata": {"name": worker.name, "namespace": namespace, "uid": worker.uid}}
        options = DeleteOptions(uid=worker.uid, grace_seconds=worker.grace_seconds)
        try:
            last = await self._client.delete(PODS, namespace, worker.name, options)
        except (NotFoundError, ConflictError):  # deleted already, and maybe another one has its name
            self._pods.gone(gone)
            return
        if last.get("kind") == PODS.kind and last["metadata"].get("deletionTimestamp") and worker.grace_seconds != 0:
            self._pods.put(last)
        else:
            self._pods.gone(gone)

    async def delete_job(self, job: LLMTrainJob) -> None:
        metadata = job.metadata
        try:
            await self._client.delete(JOBS, metadata.namespace, metadata.name, DeleteOptions(uid=metadata.uid))
        except (NotFoundError, ConflictError):
            self._jobs.gone({"metadata": metadata.to_wire()})

    async def emit_event(self, job: LLMTrainJob, event: Event) -> None:
        await self._events.record(job.metadata, event)

    def renew_secret(self, key: JobKey) -> None:
        """Apply the Secret of a job whose worker shows a wrong token: the operator's key, or the Secret, was changed.

        Kubernetes then brings the new token into the running pods within a minute or two.
        """
        manifest = self._jobs.get(key.namespace, key.name)
        if manifest is None:
            return
        try:
            job = LLMTrainJob.parse(manifest)
        except ValidationError:
            return  # it has no workers of ours
        renewing = asyncio.ensure_future(self._ensure_secret(job))
        self._renewing.add(renewing)
        renewing.add_done_callback(lambda done: self._renewed(key, done))

    def _renewed(self, key: JobKey, done: asyncio.Future[None]) -> None:
        self._renewing.discard(done)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            logger.warning("%s: the token's Secret could not be renewed: %s", key, error)

    def _leftover(self, job: LLMTrainJob) -> str:
        """Return the name of a living pod that another job of this name and namespace left, or ''."""
        for pod in self._pods.group(str(_key_of_job(job))):
            ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            if not ended and _owned_by_another_job(pod, job.metadata.uid):
                return str(pod["metadata"]["name"])
        return ""

    async def _refresh_job(self, metadata: Metadata) -> None:
        try:
            self._jobs.put(await self._client.get(JOBS, metadata.namespace, metadata.name))
        except NotFoundError:
            self._jobs.gone({"metadata": metadata.to_wire()})

    async def _ensure_secret(self, job: LLMTrainJob) -> None:
        """Apply the token's Secret; workers that are created together share one write."""
        uid, now = job.metadata.uid, asyncio.get_running_loop().time()
        applied_at, write = self._secrets.get(uid, (0.0, None))
        if write is None or now - applied_at > SECRET_TRUSTED_SECONDS or (write.done() and write.exception()):
            write = asyncio.create_task(self._apply_secret(job))
            self._secrets[uid] = (now, write)
        await asyncio.shield(write)

    async def _apply_secret(self, job: LLMTrainJob) -> None:
        await self._client.apply(SECRETS, token_secret(job, job_token(self._options.key, job.metadata.uid)))

    # ---- news

    def _job_changed(self, job: Object) -> None:
        if self._jobs.get(job["metadata"]["namespace"], job["metadata"]["name"]) is None:
            self._secrets.pop(job["metadata"].get("uid", ""), None)
        self._enqueue(_key_of(job))

    def _pod_changed(self, pod: Object) -> None:
        metadata = pod["metadata"]
        exists = self._pods.get(metadata["namespace"], metadata["name"]) is not None
        if exists and trouble(pod)[0]:
            self._troubled_since.setdefault(metadata["uid"], time.time())
        else:
            self._troubled_since.pop(metadata["uid"], None)
        key = job_of(pod)
        if key is not None:
            self._enqueue(key)

    def _node_changed(self, node: Object) -> None:
        """Look at the jobs of a node whose fate changed; it reports its health every few minutes without news."""
        name = node["metadata"]["name"]
        news = self._news_of(name)
        if news == self._node_news.get(name, NodeNews()):
            return
        self._node_news[name] = news
        for pod in self._pods:
            key = job_of(pod) if node_of(pod) == name else None
            if key is not None:
                self._enqueue(key)

    def _news_of(self, node_name: str) -> NodeNews:
        """Return what is known of a node: nothing where nodes are not watched."""
        if not node_name or not len(self._nodes):
            return NodeNews()
        node = self._nodes.get("", node_name)
        if node is None:
            return NodeNews(lost="the node does not exist any more")
        return NodeNews(lost(node), hardware(node))


def _owned_by_another_job(pod: Object, job_uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or []
    jobs = [owner for owner in owners if owner.get("kind") == KIND and owner.get("controller")]
    return any(owner.get("uid") != job_uid for owner in jobs)


def _key_of_job(job: LLMTrainJob) -> JobKey:
    return JobKey(job.metadata.namespace, job.metadata.name)


def _key_of(job: Object) -> JobKey:
    return JobKey(job["metadata"]["namespace"], job["metadata"]["name"])
