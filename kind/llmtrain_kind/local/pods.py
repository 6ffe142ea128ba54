"""Find a pod's processes from the host's side."""

from typing import Any

from llmtrain_kind.errors import Refused
from llmtrain_kind.local.api import Api, ApiError
from llmtrain_kind.local.layout import Layout


def init_pid(layout: Layout, namespace: str, pod: str, container: str) -> int:
    """The host's pid of PID 1 of a running container (containerd's shim writes it beside the container's spec)."""
    try:
        found = Api(layout).get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
    except ApiError as error:
        if error.status == 404:
            raise Refused(f"there is no pod {pod} in namespace {namespace}") from None
        raise
    identity = container_id(found, container)
    node = next(node for node in layout.nodes if node.name == found["spec"]["nodeName"])
    path = node.run / "containerd" / "io.containerd.runtime.v2.task" / "k8s.io" / identity / "init.pid"
    try:
        return int(path.read_text())
    except FileNotFoundError:
        raise Refused(f"container {identity[:12]} of pod {pod} does not run on {node.name} any more") from None


def container_id(pod: dict[str, Any], container: str) -> str:
    """The runtime's id of a running container of a pod; of its first container if ``container`` is empty."""
    name = pod["metadata"]["name"]
    wanted = container or pod["spec"]["containers"][0]["name"]
    for status in pod["status"].get("containerStatuses", []):
        if status["name"] == wanted:
            if "running" not in status.get("state", {}):
                raise Refused(f"container {wanted} of pod {name} is not running")
            return str(status["containerID"]).partition("://")[2]
    known = ", ".join(entry["name"] for entry in pod["spec"]["containers"])
    raise Refused(f"pod {name} has no running container {wanted!r}; its containers: {known}")
