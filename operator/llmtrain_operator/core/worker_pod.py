"""The pod of one worker, as plain data; it passes Pod Security `restricted` unless the user's template differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llmtrain_api.constants import CONTAINER, GROUP, LABEL_ATTEMPT, LABEL_JOB_UID, LABEL_WORKER, VOLUME_ROOT, Env
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_api.uris import Uri
from llmtrain_operator.core.actions import CreateWorker
from llmtrain_operator.core.names import token_secret_name
from llmtrain_operator.core.objects import TOKEN_KEY, job_labels, owner_reference
from llmtrain_operator.core.overlay import keep_away, overlay

ANNOTATION_REPLICAS = f"{GROUP}/replicas"
"""Size of the gang that the pod was made for: after a resize, pods of another size are replaced."""
ANNOTATION_AVOIDS = f"{GROUP}/avoids"
"""Names of the nodes where the pod must not be placed, with spaces between."""
TOKEN_FOLDER = f"/var/run/secrets/{GROUP}"
USER_ID = 65532
"""The `nonroot` user of distroless images; ours has it too."""
EXTRA_GRACE_SECONDS = 10
"""On top of spec.failurePolicy.deadlines.stopSeconds: the agent ends its ranks, then reports, then leaves."""
CONTAINER_SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
SIDECAR_SECURITY: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""What a user's further containers get where they say nothing: just what `restricted` asks for."""


@dataclass(frozen=True)
class PodSettings:
    """What is the same for all pods of this operator."""

    coordinator_url: str
    """Base address of the coordinator as seen from the pods."""
    image_pull_policy: str = ""
    """Empty: Kubernetes' own default."""


def claims(spec: LLMTrainJobSpec) -> list[str]:
    """Return the PersistentVolumeClaims that the job's addresses name, each once, sorted."""
    addresses: list[str | None] = [spec.checkpoint.store, spec.data.tokenizer.uri, spec.model.init_from]
    addresses += [source.uri for source in spec.data.sources]
    addresses += [spec.metrics.tensorboard.uri] if spec.metrics.tensorboard else []
    return sorted({claim for address in addresses if address and (claim := _claim(address))})


def build_pod(job: LLMTrainJob, worker: CreateWorker, settings: PodSettings) -> dict[str, Any]:
    """Return the manifest of a worker's pod."""
    own = _pod_spec(job, worker, settings)
    spec = overlay(own, job.spec.workers.template.spec)
    for name in ("containers", "initContainers"):
        if isinstance(spec.get(name), list):
            spec[name] = [_restricted(container) for container in spec[name]]
    if worker.avoid_nodes:
        spec["affinity"] = keep_away(spec.get("affinity"), worker.avoid_nodes)
    annotations = {
        ANNOTATION_REPLICAS: str(job.spec.workers.replicas),
        "kubectl.kubernetes.io/default-container": CONTAINER,
        **({ANNOTATION_AVOIDS: " ".join(worker.avoid_nodes)} if worker.avoid_nodes else {}),
    }
    labels = {LABEL_WORKER: str(worker.index), LABEL_ATTEMPT: str(worker.attempt)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": worker.name,
            "namespace": job.metadata.namespace,
            "labels": {**job_labels(job), **labels},
            "annotations": annotations,
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def _pod_spec(job: LLMTrainJob, worker: CreateWorker, settings: PodSettings) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": job.spec.failure_policy.deadlines.stop_seconds + EXTRA_GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"podAntiAffinity": _spread(job)},
        "containers": [_container(job, worker, settings)],
        "volumes": [
            {"name": "token", "secret": {"secretName": token_secret_name(job), "defaultMode": 0o440}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
            *({"name": volume, "persistentVolumeClaim": {"claimName": claim}} for volume, claim in _volumes(job)),
        ],
    }


def _container(job: LLMTrainJob, worker: CreateWorker, settings: PodSettings) -> dict[str, Any]:
    accelerator = job.spec.workers.accelerator
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.spec.workers.image,
        "command": ["llmtrain-agent"],
        "env": _environment(job, worker, settings),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
            *({"name": volume, "mountPath": f"{VOLUME_ROOT}/{claim}"} for volume, claim in _volumes(job)),
        ],
    }
    if job.spec.checkpoint.secret_name:  # a name that env has too is env's
        container["envFrom"] = [{"secretRef": {"name": job.spec.checkpoint.secret_name}}]
    if accelerator.count:
        container["resources"] = {"limits": {accelerator.resource: str(accelerator.count)}}
    if job.spec.metrics.prometheus:
        container["ports"] = [{"name": "metrics", "containerPort": job.spec.metrics.prometheus.port}]
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    return container


def _environment(job: LLMTrainJob, worker: CreateWorker, settings: PodSettings) -> list[dict[str, Any]]:
    plain = {
        Env.COORDINATOR_URL: settings.coordinator_url,
        Env.TOKEN_FILE: f"{TOKEN_FOLDER}/{TOKEN_KEY}",
        Env.JOB_NAMESPACE: job.metadata.namespace,
        Env.JOB_NAME: job.metadata.name,
        Env.JOB_UID: job.metadata.uid,
        Env.WORKER_INDEX: str(worker.index),
        Env.GRACE_SECONDS: str(job.spec.failure_policy.deadlines.stop_seconds),
        # The root file system is read-only, and libraries keep caches below the home folder.
        "HOME": "/tmp",
    }
    fields = {Env.POD_NAME: "metadata.name", Env.POD_ADDRESS: "status.podIP"}
    return [
        *({"name": str(name), "value": value} for name, value in plain.items()),
        *({"name": str(name), "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def _spread(job: LLMTrainJob) -> dict[str, Any]:
    """Prefer a node of its own for each worker; a preference only, so that small clusters can run every job."""
    term = {
        "labelSelector": {"matchLabels": {LABEL_JOB_UID: job.metadata.uid}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


def _volumes(job: LLMTrainJob) -> Iterable[tuple[str, str]]:
    """Volume name and claim; a claim's own name may be too long, or hold dots, which a volume's may not."""
    return [(f"claim-{number}", claim) for number, claim in enumerate(claims(job.spec))]


def _claim(address: str) -> str:
    try:
        return Uri.parse(address).claim
    except ValueError:
        return ""  # the rules of the contract report it; nothing can be mounted for it


def _restricted(container: Any) -> Any:
    if not isinstance(container, dict):
        return container
    given = container.get("securityContext")
    return {**container, "securityContext": {**SIDECAR_SECURITY, **(given if isinstance(given, dict) else {})}}
