"""The configuration of a kind cluster (kind.x-k8s.io/v1alpha4), as JSON, which kind reads as YAML."""

import json
from pathlib import Path
from typing import Any

from llmtrain_kind.errors import Refused
from llmtrain_kind.feature_gates import gates, runtime_config
from llmtrain_kind.settings import ClusterSettings

#: The node images of kind v0.33.0, by Kubernetes minor version (release notes of kind; the digest is part of the name).
NODE_IMAGES = {
    34: "kindest/node:v1.34.11@sha256:44e222ee2132dab25ff87301682f89eb82c7880ea3a1bf543bfe9708fd08d67d",
    35: "kindest/node:v1.35.8@sha256:07b2536e30b803ed61d1677a79df6115f798ce64c80f9e22f6ed45afd09323c0",
    36: "kindest/node:v1.36.4@sha256:099e049362a1526b2db71494e1947aae99bd16290d7c895f2b7ea312e3cbfaed",
    37: "kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5",
}

SHARED_ON_NODES = "/llmtrain/shared"
_AUDIT_ON_NODES = "/llmtrain/audit"


def mount_on_nodes(index: int) -> str:
    """Where a node of kind sees the source of the --mount with this number."""
    return f"/llmtrain/mounts/{index}"


def node_image(kubernetes: str) -> str:
    """The node image of kind's release for this minor version: kind has one patch version of each."""
    minor = int(kubernetes.split(".")[1])
    if minor not in NODE_IMAGES:
        known = ", ".join(f"1.{number}" for number in sorted(NODE_IMAGES))
        raise Refused(f"--kubernetes {kubernetes}: provider kind has node images for {known}")
    return NODE_IMAGES[minor]


def render(settings: ClusterSettings, shared: Path, audit: Path) -> str:
    """One control plane and ``settings.nodes`` workers; the shared folder on all, the audit log on the first."""
    image = node_image(settings.kubernetes)
    mounts: list[dict[str, Any]] = [{"hostPath": str(shared), "containerPath": SHARED_ON_NODES}]
    for index, (source, _) in enumerate(settings.mounts):
        mounts.append({"hostPath": source, "containerPath": mount_on_nodes(index), "readOnly": True})
    audit_mount = {"hostPath": str(audit), "containerPath": _AUDIT_ON_NODES}
    first: dict[str, Any] = {"role": "control-plane", "image": image, "extraMounts": [*mounts, audit_mount]}
    worker = {"role": "worker", "image": image, "extraMounts": mounts}
    kubelet = {"kind": "KubeletConfiguration", "serializeImagePulls": False, "nodeStatusUpdateFrequency": "3s"}
    content = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "name": settings.name,
        "nodes": [first, *([worker] * settings.nodes)],
        "featureGates": gates(settings.kubernetes),
        "runtimeConfig": runtime_config(settings.kubernetes),
        "kubeadmConfigPatches": [json.dumps(kubelet)],
        "kubeadmConfigPatchesJSON6902": [_control_plane_patch(settings.kubernetes)],
    }
    return json.dumps(content, indent=1)


def _control_plane_patch(kubernetes: str) -> dict[str, Any]:
    """Audit log and fast node loss, added to what kind itself writes (a merge patch would replace its lists)."""
    # kind writes kubeadm's v1beta4, where arguments are a list, from Kubernetes 1.36 on, and v1beta3, a map, before.
    listed = int(kubernetes.split(".")[1]) >= 36
    volume = {"name": "audit", "hostPath": _AUDIT_ON_NODES, "mountPath": _AUDIT_ON_NODES, "pathType": "Directory"}
    arguments = {
        "apiServer": {
            "audit-policy-file": f"{_AUDIT_ON_NODES}/policy.json",
            "audit-log-path": f"{_AUDIT_ON_NODES}/audit.jsonl",
            "audit-log-maxsize": "10000",
            "enable-aggregator-routing": "true",
        },
        "controllerManager": {"node-monitor-grace-period": "15s", "node-monitor-period": "1s"},
    }
    operations: list[dict[str, Any]] = [{"op": "add", "path": "/apiServer/extraVolumes", "value": [volume]}]
    for component, flags in arguments.items():
        for flag, value in flags.items():
            path = f"/{component}/extraArgs/"
            added = (path + "-", {"name": flag, "value": value}) if listed else (path + flag, value)
            operations.append({"op": "add", "path": added[0], "value": added[1]})
    return {
        "group": "kubeadm.k8s.io",
        "version": "v1beta4" if listed else "v1beta3",
        "kind": "ClusterConfiguration",
        "patch": json.dumps(operations),
    }
