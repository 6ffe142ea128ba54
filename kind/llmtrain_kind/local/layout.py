"""Names, addresses and paths of one local cluster: all follow from its settings, above all from its slot.

Whatever exists machine-wide carries the slot's number: the bridge `llmtrain3`, network namespaces and cgroups below
`llmtrain3`, /run/llmtrain3. So what a killed start left can be found again without having been written down.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmtrain_kind.settings import ClusterSettings

DNS_DOMAIN = "cluster.local"
PAUSE_IMAGE = "localhost/llmtrain-pause:1"


def slot_name(slot: int) -> str:
    """The name that everything machine-wide of a slot carries; with a node's suffix it fits IFNAMSIZ (15)."""
    return f"llmtrain{slot}"


@dataclass(frozen=True)
class Node:
    """One node: a network namespace with its own containerd, kubelet and kube-proxy."""

    cluster: "Layout"
    index: int

    @property
    def name(self) -> str:
        return f"node-{self.index}"

    @property
    def address(self) -> str:
        return f"10.89.{self.cluster.slot}.{10 + self.index}"

    @property
    def pod_range(self) -> str:
        return f"10.{144 + self.cluster.slot}.{self.index}.0/24"

    @property
    def netns(self) -> str:
        return f"{self.cluster.prefix}-{self.name}"

    @property
    def veth(self) -> str:
        """The host's end of the node's cable; the node's end is eth0."""
        return f"{self.cluster.prefix}n{self.index}"

    @property
    def cgroup(self) -> str:
        """Path of the node's cgroup inside every hierarchy."""
        return f"/{self.cluster.prefix}/{self.name}"

    @property
    def folder(self) -> Path:
        return self.cluster.state / self.name

    @property
    def run(self) -> Path:
        """Sockets and running containers: short, since a socket's path may have 107 characters."""
        return self.cluster.run / self.name

    @property
    def socket(self) -> Path:
        return self.run / "containerd.sock"

    def record(self, component: str) -> Path:
        return self.cluster.record(f"{self.name}.{component}")

    def log(self, component: str) -> Path:
        return self.cluster.log(f"{self.name}.{component}")


@dataclass(frozen=True)
class Layout:
    """Names, addresses and paths of the cluster with these settings; ``programs`` is the folder of the binaries."""

    settings: ClusterSettings
    programs: Path

    @property
    def slot(self) -> int:
        return self.settings.slot

    @property
    def state(self) -> Path:
        return self.settings.state

    @property
    def prefix(self) -> str:
        return slot_name(self.slot)

    @property
    def run(self) -> Path:
        return Path("/run") / self.prefix

    @property
    def bridge(self) -> str:
        return self.prefix

    @property
    def bridge_address(self) -> str:
        """The host's address on the bridge: API server and DNS listen here."""
        return f"10.89.{self.slot}.1"

    @property
    def loopback(self) -> str:
        """A loopback address of the cluster's own, so that fixed ports never meet: etcd and the controllers."""
        return f"127.89.{self.slot}.1"

    @property
    def node_range(self) -> str:
        return f"10.89.{self.slot}.0/24"

    @property
    def pod_range(self) -> str:
        return f"10.{144 + self.slot}.0.0/16"

    @property
    def service_range(self) -> str:
        return f"10.{176 + self.slot}.0.0/16"

    @property
    def service_address(self) -> str:
        """The address of the service `kubernetes`."""
        return f"10.{176 + self.slot}.0.1"

    @property
    def api_url(self) -> str:
        return f"https://{self.bridge_address}:6443"

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(self, index) for index in range(self.settings.nodes))

    @property
    def shared(self) -> Path:
        return self.state / "shared"

    @property
    def audit_log(self) -> Path:
        return self.state / "log" / "audit.jsonl"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def admin_kubeconfig(self) -> Path:
        """The kubeconfig for people and tests: the whole cluster is theirs."""
        return self.kubeconfig("admin")

    def kubeconfig(self, user: str) -> Path:
        return self.state / "kubeconfigs" / user

    def record(self, component: str) -> Path:
        return self.state / "pids" / component

    def log(self, component: str) -> Path:
        return self.state / "log" / f"{component}.log"
