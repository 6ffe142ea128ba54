"""Pod Security `restricted`, as the admission plugin checks it, on a manifest.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/ (restricted, and baseline below it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ALLOWED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(pod: dict[str, Any]) -> list[str]:
    """Return every rule of `restricted` that a PodSpec breaks."""
    return [*_of_pod(pod), *(problem for container in _containers(pod) for problem in _of_container(pod, container))]


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def _of_pod(pod: dict[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is set"
    for volume in pod.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= ALLOWED_VOLUMES:
            yield f"volume {volume['name']} is a {', '.join(kinds)}"
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls are set"


def _of_container(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    name, own, shared = container["name"], container.get("securityContext", {}), pod.get("securityContext", {})
    if own.get("privileged"):
        yield f"{name} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may escalate privileges"
    if "ALL" not in own.get("capabilities", {}).get("drop", []):
        yield f"{name} keeps capabilities"
    if not set(own.get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"}:
        yield f"{name} adds capabilities"
    if not own.get("runAsNonRoot", shared.get("runAsNonRoot")):
        yield f"{name} may run as root"
    if own.get("runAsUser", shared.get("runAsUser")) == 0:
        yield f"{name} runs as user 0"
    profile = own.get("seccompProfile", shared.get("seccompProfile", {})).get("type")
    if profile not in ("RuntimeDefault", "Localhost"):
        yield f"{name} has no seccomp profile"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield f"{name} takes a port of the host"
