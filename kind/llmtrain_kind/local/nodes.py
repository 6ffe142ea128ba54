"""One node's life: start, kill as if the power went, start again.

A node is a network namespace and a mount namespace, the latter born with its containerd: whatever is mounted for pods
is seen by this node alone and vanishes with its last process.
"""

import shutil
from functools import partial
from pathlib import Path

from llmtrain_kind import processes
from llmtrain_kind.errors import ClusterError
from llmtrain_kind.local import configs, control_plane, network
from llmtrain_kind.local.api import Api, ApiError
from llmtrain_kind.local.cgroups import Cgroups
from llmtrain_kind.local.layout import PAUSE_IMAGE, Layout, Node
from llmtrain_kind.local.sweep import end_node
from llmtrain_kind.shell import run

COMPONENTS = ("containerd", "kubelet", "kube-proxy")

#: Paths fixed in the code of kubelet, containerd and CNI. Each node has folders of its own there, so that nodes do not
#: meet each other, nor a kubelet or containerd of the machine itself.
PRIVATE_FOLDERS = {
    "kubelet": Path("/var/lib/kubelet"),
    "cni-cache": Path("/var/lib/cni"),
    "container-logs": Path("/var/log/containers"),
    "containerd-run": Path("/run/containerd"),
}

# slave: what the host mounts later is seen, nothing gets out. shared: containers may ask for propagation.
_ENTER_MOUNT_NAMESPACE = """
mount --make-rshared / || exit
while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit; shift 2; done
shift; exec "$@"
"""


def prepare(node: Node, cgroups: Cgroups, snapshotter: str) -> None:
    """Make a node's network, cgroup and configuration files; nothing of a former life may be there."""
    node.run.mkdir(parents=True, exist_ok=True)
    network.make_node(node)
    cgroups.make(node.cgroup)
    folder = node.folder
    configs.write(folder / "containerd.toml", configs.containerd(node, snapshotter))
    configs.write(folder / "cni" / "10-llmtrain.conflist", configs.cni(node))
    configs.write(folder / "kubelet.json", configs.kubelet(node, cgroups.unified))
    configs.write(folder / "kube-proxy.json", configs.kube_proxy(node))


def start_runtime(node: Node, lock: int) -> None:
    """Start containerd and load the pause image; needs no API server."""
    _start(node, "containerd", lock)
    cluster = node.cluster
    control_plane.wait(cluster, f"containerd of {node.name}", (f"{node.name}.containerd",), node.socket.exists)
    if PAUSE_IMAGE not in run([*ctr(node), "images", "ls", "-q"]).split():
        run([*ctr(node), "images", "import", cluster.state / "pause.tar"])


def start_agents(node: Node, lock: int) -> None:
    """Start kubelet and kube-proxy."""
    for component in ("kubelet", "kube-proxy"):
        _start(node, component, lock)


def wait_ready(layout: Layout, nodes: tuple[Node, ...]) -> None:
    """Wait until the nodes are Ready, and show their GPUs."""
    api = Api(layout)
    for node in nodes:
        components = tuple(f"{node.name}.{component}" for component in COMPONENTS)
        control_plane.wait(layout, f"{node.name} to be Ready", components, partial(_ready, api, node))
        # The capacity lies in the Node object's status, which nobody but us sets: a new object lacks it.
        api.merge(f"/api/v1/nodes/{node.name}/status", configs.gpus())


def kill(node: Node, cgroups: Cgroups) -> None:
    """End a node as a power failure would: its network goes first, so that no socket says goodbye."""
    if not network.is_cut(node):
        network.cut(node)
    end_node(node, cgroups)
    network.remove_namespace(node.netns)
    network.remove_link(node.veth)
    cgroups.remove(node.cgroup)
    # What a real node keeps in memory is gone after a power failure; disks (images, volumes, logs) stay.
    shutil.rmtree(node.run, ignore_errors=True)


def alive(node: Node) -> bool:
    """Whether all processes of the node run."""
    records = [processes.read_record(node.record(component)) for component in COMPONENTS]
    return all(record is not None and record.alive() for record in records)


def ctr(node: Node) -> list[str | Path]:
    """The words of a `ctr` command for the images and containers that this node's kubelet sees."""
    return [node.cluster.programs / "ctr", "--address", node.socket, "--namespace", "k8s.io"]


def _start(node: Node, component: str, lock: int) -> None:
    record = node.record(component)
    running = processes.read_record(record)
    if running is not None and running.alive():
        return
    # containerd finds its shim, and the shim runc, by PATH.
    path = {"PATH": f"{node.cluster.programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    command = [*_inside(node, component), node.cluster.programs / component, *_arguments(node, component)]
    processes.start(command, record, node.log(component), lock, path)


def _inside(node: Node, component: str) -> list[str | Path]:
    """The words that put a component into the node's namespaces."""
    if component == "containerd":
        binds: list[str | Path] = []
        for name, target in PRIVATE_FOLDERS.items():
            (node.folder / name).mkdir(exist_ok=True)
            binds += [node.folder / name, target]
        unshare = ["unshare", "--mount", "--propagation", "slave"]
        return [*network.inside(node), *unshare, "sh", "-c", _ENTER_MOUNT_NAMESPACE, "sh", *binds, "--"]
    containerd = processes.read_record(node.record("containerd"))
    if containerd is None:
        raise ClusterError(f"{node.name}: containerd does not run")
    return ["nsenter", f"--net=/proc/{containerd.pid}/ns/net", f"--mount=/proc/{containerd.pid}/ns/mnt"]


def _arguments(node: Node, component: str) -> list[str | Path]:
    if component == "containerd":
        return ["--config", node.folder / "containerd.toml"]
    if component == "kube-proxy":
        return ["--config", node.folder / "kube-proxy.json"]
    kubeconfig = node.cluster.kubeconfig(node.name)
    return [
        *("--config", node.folder / "kubelet.json", "--kubeconfig", kubeconfig),
        *("--root-dir", PRIVATE_FOLDERS["kubelet"], "--cert-dir", node.folder / "kubelet-pki"),
        *("--hostname-override", node.name, "--node-ip", node.address),
    ]


def forget_ready(node: Node) -> None:
    """Take back what the node's former life said of itself, as the control plane does some seconds after its end."""
    conditions = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
    try:
        Api(node.cluster).strategic_merge(f"/api/v1/nodes/{node.name}/status", {"status": {"conditions": conditions}})
    except ApiError as error:
        # The first start failed before the node was known.
        if error.status != 404:
            raise


def _ready(api: Api, node: Node) -> bool:
    try:
        found = api.get(f"/api/v1/nodes/{node.name}")
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    conditions = found["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
