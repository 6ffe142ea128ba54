"""One look at one job: observe, decide, carry out. It holds no truth: killing it anywhere loses nothing.

The order is the guarantee: the status is durable before a worker is deleted, created or told anything, so whoever
looks next, after a crash at any point, decides from the same facts and does what is left to do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from llmtrain_api.constants import TERMINAL_STATES
from llmtrain_api.job import LLMTrainJob, Metadata
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.coordinator.hub import Hub
from llmtrain_operator.core.actions import Event, Plan
from llmtrain_operator.core.observed import Observed, Policy
from llmtrain_operator.runtime.backend import Backend, BackendError, JobKey
from llmtrain_operator.runtime.rejection import describe, rejected_status
from llmtrain_operator.runtime.stores import store_owner
from llmtrain_operator.runtime.workqueue import RetryLaterError

logger = logging.getLogger(__name__)

CONCURRENT_WRITES = 16
"""Workers created or deleted at the same time, over all jobs."""


Result = Literal["ok", "retry", "error"]


class Listener(Protocol):
    """Who wants to know what was done (metrics)."""

    def reconciled(self, result: Result, seconds: float) -> None:
        """Take note of one look at one job and how long it took."""

    def decided(self, key: JobKey, before: LLMTrainJobStatus, plan: Plan) -> None:
        """Take note of a plan whose status is durable."""

    def forgotten(self, key: JobKey) -> None:
        """Take note that a job is gone."""

    def unreadable(self, key: JobKey) -> None:
        """Take note of an object that cannot be parsed."""


@dataclass(frozen=True)
class Decisions:
    """The pure functions that decide."""

    plan: Callable[[Observed], Plan]
    spec_errors: Callable[[LLMTrainJob], Sequence[str]]
    """Rules of the contract that a parsed spec breaks."""
    policy: Policy = field(default_factory=Policy)


class Reconciler:
    """Looks at jobs, one at a time per key."""

    def __init__(
        self,
        backend: Backend,
        hub: Hub,
        decisions: Decisions,
        *,
        enqueue: Callable[[JobKey], None],
        listener: Listener,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._hub = hub
        self._decisions = decisions
        self._enqueue = enqueue
        self._listener = listener
        self._clock = clock
        self._observing_since: float | None = None
        self._writes = asyncio.Semaphore(CONCURRENT_WRITES)
        self._waiting_for: defaultdict[str, set[JobKey]] = defaultdict(set)
        """Owner of a store to the jobs that wait for it to finish."""

    def admit_all(self) -> None:
        """Make every job and worker known to the hub, so that no agent is refused while its job awaits its turn.

        To be called when agents can reach this process: from now on silence means something.
        """
        self._observing_since = self._clock()
        for key in self._backend.job_keys():
            manifest = self._backend.job_manifest(key)
            try:
                job = LLMTrainJob.parse(manifest) if manifest else None
            except ValidationError:
                continue
            if job is not None and job.metadata.uid:
                self._hub.admit(key, job.metadata.uid, [w.name for w in self._backend.workers(job)])

    def stood_still(self) -> None:
        """Take note that this process did nothing for a while: what agents said meanwhile is not read yet.

        Silence counts anew from here, or an operator that was starved would take every worker for lost.
        """
        if self._observing_since is not None:
            self._observing_since = self._clock()

    async def reconcile(self, key: JobKey) -> float | None:
        """Bring one job nearer to what its spec wants; return the seconds until it must be looked at again.

        Raises:
            RetryLaterError: a write failed; what was not done is decided anew next time.
        """
        manifest = self._backend.job_manifest(key)
        if manifest is None:
            self._forget(key)
            return None
        try:
            job = LLMTrainJob.parse(manifest)
        except ValidationError as error:
            await self._reject(key, manifest, error)
            return None
        observed = self._observe(key, job, manifest)
        if job.spec.parallelism.plan_for:
            # Choosing a layout may take a second, once; agents must not wait for it.
            plan = await asyncio.to_thread(self._decisions.plan, observed)
        else:
            plan = self._decisions.plan(observed)
        if plan.status_changed:
            await self._write_status(job.metadata, plan.status)
        self._listener.decided(key, job.status, plan)
        await self._carry_out(key, job, plan, observed)
        if plan.status.state in TERMINAL_STATES:
            self._wake_those_waiting_for(key)
            return plan.requeue_after
        return self._next_look(observed, plan)

    # ---- observe

    def _observe(self, key: JobKey, job: LLMTrainJob, manifest: Mapping[str, Any]) -> Observed:
        workers = self._backend.workers(job)
        self._hub.admit(key, job.metadata.uid, [worker.name for worker in workers])
        agents = self._hub.agents(job.metadata.uid)
        owner = store_owner(manifest, self._manifests())
        if owner:
            self._waiting_for[owner].add(key)
        return Observed(
            job=job,
            now=self._clock(),
            workers=tuple(replace(worker, agent=agents.get(worker.name)) for worker in workers),
            spec_errors=tuple(self._decisions.spec_errors(job)),
            store_owner=owner,
            policy=self._decisions.policy,
            heard_at=self._hub.heard_at,
            observing_since=self._observing_since,
        )

    def _manifests(self) -> list[Mapping[str, Any]]:
        found = (self._backend.job_manifest(key) for key in self._backend.job_keys())
        return [manifest for manifest in found if manifest is not None]

    def _next_look(self, observed: Observed, plan: Plan) -> float | None:
        """Mere progress is no news, so a job that makes some is looked at in every status period."""
        period = self._decisions.policy.status_period_seconds
        if not any(worker.agent and worker.agent.progress for worker in observed.workers):
            return plan.requeue_after
        return period if plan.requeue_after is None else min(plan.requeue_after, period)

    # ---- carry out

    async def _write_status(self, metadata: Metadata, status: LLMTrainJobStatus) -> None:
        try:
            await self._backend.write_status(metadata, status)
        except BackendError as error:
            raise RetryLaterError(f"the status could not be written: {error}", error.retry_after) from error

    async def _carry_out(self, key: JobKey, job: LLMTrainJob, plan: Plan, observed: Observed) -> None:
        """Do all that can be done; a write that fails keeps none of the others from happening."""
        known = [worker.name for worker in observed.workers] + [worker.name for worker in plan.create]
        self._hub.admit(key, job.metadata.uid, known)
        errors = await self._all([self._backend.delete_worker(job, worker) for worker in plan.delete])
        errors += await self._all([self._backend.create_worker(job, worker) for worker in plan.create])
        self._hub.publish(job.metadata.uid, plan.orders)
        for event in plan.events:
            await self._emit(job, event)
        for message in sorted({str(error) for error in errors}):
            await self._emit(job, Event("Warning", "WriteFailed", message[:1000]))
        if plan.delete_job and not errors:
            errors += await self._all([self._backend.delete_job(job)])
        if errors:
            asked = [error.retry_after for error in errors if error.retry_after is not None]
            raise RetryLaterError(f"{len(errors)} writes failed, first: {errors[0]}", max(asked, default=None))

    async def _all(self, writes: Sequence[Awaitable[None]]) -> list[BackendError]:
        return [error for error in await asyncio.gather(*map(self._one, writes)) if error is not None]

    async def _one(self, write: Awaitable[None]) -> BackendError | None:
        async with self._writes:
            try:
                await write
            except BackendError as error:
                return error
        return None

    async def _emit(self, job: LLMTrainJob, event: Event) -> None:
        try:
            await self._backend.emit_event(job, event)
        except BackendError as error:
            logger.info("%s/%s: an event was lost: %s", job.metadata.namespace, job.metadata.name, error)

    # ---- the odd ones

    def _forget(self, key: JobKey) -> None:
        uid = self._hub.uid_of(key)
        if uid is not None:
            self._hub.forget(uid)
        self._listener.forgotten(key)
        self._wake_those_waiting_for(key)

    def _wake_those_waiting_for(self, key: JobKey) -> None:
        for waiting in self._waiting_for.pop(str(key), ()):
            self._enqueue(waiting)

    async def _reject(self, key: JobKey, manifest: Mapping[str, Any], error: ValidationError) -> None:
        """Say in the status what is wrong with an object that an old CRD let pass; its workers are left as they are."""
        logger.error("%s cannot be read: %s", key, describe(manifest, error))
        self._listener.unreadable(key)
        rejected = rejected_status(manifest, error, self._clock())
        if rejected is not None:
            await self._write_status(*rejected)
