"""The seam between deciding and doing: a backend is a cluster, this machine's processes, or a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmtrain_api.job import LLMTrainJob, Metadata
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core.actions import CreateWorker, DeleteWorker, Event
from llmtrain_operator.core.observed import Worker


@dataclass(frozen=True, order=True)
class JobKey:
    """namespace/name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Backend(Protocol):
    """What the reconciler needs. Reads come from caches and never block; writes may raise BackendError.

    Reads show the backend's own writes at once: after `write_status` returned, `job_manifest` has that status; after
    `create_worker`, `workers` has that worker; after `delete_worker`, it is deleting or gone.
    """

    def job_manifest(self, key: JobKey) -> dict[str, Any] | None:
        """Return the newest object known, or None where it is gone."""

    def job_keys(self) -> Sequence[JobKey]:
        """Return the keys of all jobs known."""

    def workers(self, job: LLMTrainJob) -> Sequence[Worker]:
        """Return the workers of this job (by its uid), agents not filled in."""

    async def write_status(self, metadata: Metadata, status: LLMTrainJobStatus) -> None:
        """Make the whole status of the job with that metadata durable (its spec may be unreadable)."""

    async def create_worker(self, job: LLMTrainJob, worker: CreateWorker) -> None:
        """Create the worker; idempotent by name."""

    async def delete_worker(self, job: LLMTrainJob, worker: DeleteWorker) -> None:
        """Delete the worker; fine where it is gone."""

    async def delete_job(self, job: LLMTrainJob) -> None:
        """Delete the job itself (ttlSecondsAfterFinished)."""

    async def emit_event(self, job: LLMTrainJob, event: Event) -> None:
        """Tell people; losing one is no error."""


class BackendError(Exception):
    """A write failed. `retry_after` is what the server asked for, in seconds."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
