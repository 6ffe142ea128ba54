"""All that the operator may do at the API server. The chart grants this and no more; tests hold both sides to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmtrain_operator.kube.resources import EVENTS, JOBS, LEASES, NODES, PODS, SECRETS, Resource

Verb = Literal["get", "list", "watch", "create", "update", "patch", "delete"]


@dataclass(frozen=True, order=True)
class Permission:
    verb: Verb
    group: str
    resource: str
    """Plural, with the subresource: llmtrainjobs/status."""


def _allow(resource: Resource, *verbs: Verb, subresource: str = "") -> tuple[Permission, ...]:
    name = f"{resource.plural}/{subresource}" if subresource else resource.plural
    return tuple(Permission(verb, resource.group, name) for verb in verbs)


IN_JOB_NAMESPACES: tuple[Permission, ...] = (
    *_allow(JOBS, "get", "list", "watch"),
    *_allow(JOBS, "delete"),  # ttlSecondsAfterFinished
    *_allow(JOBS, "patch", subresource="status"),
    *_allow(PODS, "get", "list", "watch", "create", "delete"),
    *_allow(SECRETS, "create", "patch"),  # the agents' token, by server-side apply; never read
    *_allow(EVENTS, "create", "patch"),
)
"""Where LLMTrainJobs live: a ClusterRole, or a Role in each namespace that is watched."""

ON_NODES: tuple[Permission, ...] = _allow(NODES, "list", "watch")
"""Whether a node is gone or a device of it is broken. Only where all namespaces are watched: nodes belong to none."""

FOR_OWNER_REFERENCES: tuple[Permission, ...] = _allow(JOBS, "update", subresource="finalizers")
"""Never used as a request: the admission plugin OwnerReferencesPermissionEnforcement (OpenShift) asks for it before it
accepts blockOwnerDeletion on a child."""

IN_OWN_NAMESPACE: tuple[Permission, ...] = _allow(LEASES, "get", "create", "update")
"""Where the operator itself runs: leader election."""
