"""What a decision says: the new status, and what to do. A backend carries it out in the order of the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.sync import Order


@dataclass(frozen=True)
class CreateWorker:
    name: str
    index: int
    attempt: int
    avoid_nodes: tuple[str, ...] = ()
    """Names of nodes where it must not be placed."""


@dataclass(frozen=True)
class DeleteWorker:
    name: str
    uid: str
    grace_seconds: float | None = None
    """None: the worker's own termination grace. 0: at once, without waiting for its node."""


@dataclass(frozen=True)
class Event:
    """A Kubernetes event about the job; emitted only after the status that it tells of was written."""

    type: str
    """Normal | Warning"""
    reason: str
    """PascalCase."""
    message: str


@dataclass(frozen=True)
class Plan:
    """The order of carrying out is the order of these fields: the status is durable before anything is touched."""

    status: LLMTrainJobStatus
    status_changed: bool
    """False: nothing worth a write (also where only a young progress differs)."""
    delete: tuple[DeleteWorker, ...] = ()
    create: tuple[CreateWorker, ...] = ()
    orders: Mapping[str, Order] = field(default_factory=dict)
    """Worker name to the desired state of its agent; a worker that is not named gets none (404)."""
    events: tuple[Event, ...] = ()
    delete_job: bool = False
    requeue_after: float | None = None
    """Seconds until this job must be looked at again although nothing happened."""
