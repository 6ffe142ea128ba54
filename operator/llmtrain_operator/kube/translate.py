"""From a pod, as the API tells it, to a worker, as the core sees it. It takes whatever is there and never fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmtrain_api.constants import CONTAINER, LABEL_ATTEMPT, LABEL_JOB, LABEL_WORKER
from llmtrain_operator.core.observed import Worker
from llmtrain_operator.core.times import from_timestamp
from llmtrain_operator.core.worker_pod import ANNOTATION_AVOIDS, ANNOTATION_REPLICAS
from llmtrain_operator.runtime.backend import JobKey

Object = Mapping[str, Any]

HARMLESS_REASONS = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Why a container waits in the normal course of things."""
EVICTION_REASONS = frozenset({"Evicted", "Preempting", "NodeShutdown", "Shutdown", "Terminated", "NodeLost"})
"""Values of a failed pod's status.reason that tell of its node, not of the worker."""


@dataclass(frozen=True)
class NodeNews:
    """What a worker's node says; both empty where all is well."""

    lost: str = ""
    hardware: str = ""


NO_NEWS = NodeNews()


def job_of(pod: Object) -> JobKey | None:
    """Return the job that a pod says it belongs to."""
    name = _labels(pod).get(LABEL_JOB)
    return JobKey(pod["metadata"].get("namespace", ""), name) if name else None


def belongs_to(pod: Object, job_uid: str) -> bool:
    """Say whether the job controls the pod; labels alone are not enough to touch somebody's pod."""
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == job_uid and owner.get("controller") for owner in owners)


def node_of(pod: Object) -> str:
    """Return the name of the node where the pod was placed; empty before that."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def to_worker(pod: Object, waiting_since: float | None, node: NodeNews = NO_NEWS) -> Worker | None:
    """Return the worker, or None where the labels that name it were taken away.

    `waiting_since` is when its trouble (see `trouble`) was first seen, in Unix seconds.
    """
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = _labels(pod), metadata.get("annotations") or {}
    index, attempt = _count(labels.get(LABEL_WORKER)), _count(labels.get(LABEL_ATTEMPT))
    if index is None or attempt is None:
        return None
    reason, message = trouble(pod)
    ended = _ended(pod)
    return Worker(
        name=metadata["name"],
        uid=str(metadata.get("uid", "")),
        index=index,
        created_attempt=attempt,
        replicas=_count(annotations.get(ANNOTATION_REPLICAS)) or 0,
        phase=_phase(status),
        created_at=from_timestamp(metadata.get("creationTimestamp")) or 0.0,
        deleting=bool(metadata.get("deletionTimestamp")),
        node=node_of(pod),
        placed_at=_placed_at(status),
        waiting_reason=reason,
        waiting_message=message,
        waiting_since=waiting_since if reason else None,
        unschedulable_message=_unschedulable(status),
        avoids=tuple(str(annotations.get(ANNOTATION_AVOIDS) or "").split()),
        node_lost=node.lost,
        hardware=node.hardware,
        broken_device=_broken_device(pod),
        exit_code=ended.get("exitCode"),
        oom_killed=ended.get("reason") == "OOMKilled",
        disruption=_disruption(status),
    )


def trouble(pod: Object) -> tuple[str, str]:
    """Return why a container of the pod waits and cannot start: (reason, message), both empty where all is well."""
    for container in _containers(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason not in HARMLESS_REASONS:
            message = str(waiting.get("message") or "")
            name = container.get("name")
            return reason, message if name == CONTAINER else f"container {name}: {message}"
    return "", ""


def _containers(pod: Object) -> Iterator[Mapping[str, Any]]:
    """Yield the trainer's status first."""
    status = pod.get("status") or {}
    found = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
    yield from sorted(found, key=lambda container: container.get("name") != CONTAINER)


def _ended(pod: Object) -> Mapping[str, Any]:
    for container in _containers(pod):
        if container.get("name") == CONTAINER:
            terminated = (container.get("state") or {}).get("terminated")
            return terminated if isinstance(terminated, Mapping) else {}
    return {}


def _broken_device(pod: Object) -> str:
    """Return what the device plugin says of a device that the trainer holds (allocatedResourcesStatus, KEP-4680)."""
    for container in _containers(pod):
        if container.get("name") != CONTAINER:
            continue
        for resource in container.get("allocatedResourcesStatus") or []:
            for device in resource.get("resources") or []:
                if device.get("health") == "Unhealthy":
                    return f"{resource.get('name')} {device.get('resourceID')} is unhealthy"
    return ""


def _phase(status: Mapping[str, Any]) -> str:
    phase = str(status.get("phase") or "Pending")
    return "Running" if phase == "Unknown" else phase  # its node is silent; its agent tells more


def _unschedulable(status: Mapping[str, Any]) -> str:
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") != "False":
        return ""
    return str(scheduled.get("message") or scheduled.get("reason") or "")


def _placed_at(status: Mapping[str, Any]) -> float | None:
    scheduled = _condition(status, "PodScheduled")
    return from_timestamp(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None


def _disruption(status: Mapping[str, Any]) -> str:
    target = _condition(status, "DisruptionTarget")
    if target.get("status") == "True":
        return str(target.get("reason") or "DisruptionTarget")
    reason = str(status.get("reason") or "")
    return reason if reason in EVICTION_REASONS else ""


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or [] if c.get("type") == kind), {})


def _labels(pod: Object) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _count(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() else None
