"""The cluster's network: one bridge on the host, one network namespace per node, joined by a cable (veth pair).

A node is entered by `nsenter --net`, not by `ip netns exec`: the latter remounts /sys and the cgroup mounts vanish.
"""

import json
import os
import re
from ipaddress import ip_network
from pathlib import Path

from llmtrain_kind.errors import ClusterError, Refused
from llmtrain_kind.local.layout import Layout, Node
from llmtrain_kind.processes import Process, find_process
from llmtrain_kind.shell import run, succeeds

NETNS_FOLDER = Path("/run/netns")


def inside(node: Node) -> list[str]:
    """The words to put before a command that is to run in the node's network."""
    return ["nsenter", f"--net={NETNS_FOLDER / node.netns}"]


def make_bridge(layout: Layout) -> None:
    """Create the bridge that joins host and nodes."""
    _batch(bridge_commands(layout))


def bridge_commands(layout: Layout) -> list[str]:
    """The lines for `ip -batch` that make the bridge."""
    return [
        f"link add {layout.bridge} type bridge",
        f"addr add {layout.bridge_address}/24 dev {layout.bridge}",
        f"link set {layout.bridge} up",
    ]


def make_node(node: Node) -> None:
    """Create a node's network namespace, its cable and all routes."""
    run(["ip", "netns", "add", node.netns])
    cluster = node.cluster
    _batch(
        [
            f"link add {node.veth} type veth peer name eth0 netns {node.netns}",
            f"link set {node.veth} master {cluster.bridge} up",
        ]
    )
    _batch(node_commands(node), netns=node.netns)
    _batch([f"route replace {node.pod_range} via {node.address}"])
    # Hairpin: a pod that calls a service and is answered by a pod of its own node crosses the bridge cni0 both ways.
    sysctl = "echo 1 > /proc/sys/net/ipv4/ip_forward && echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables"
    run([*inside(node), "sh", "-c", sysctl])


def node_commands(node: Node) -> list[str]:
    """The lines for `ip -batch` inside the node's namespace: address, and routes to host and other nodes' pods."""
    return [
        "link set lo up",
        f"addr add {node.address}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {node.cluster.bridge_address}",
        *(f"route add {other.pod_range} via {other.address}" for other in node.cluster.nodes if other != node),
    ]


def remove_namespace(netns: str) -> None:
    """Remove a network namespace if it is there."""
    if (NETNS_FOLDER / netns).exists():
        run(["ip", "netns", "delete", netns])


def remove_link(name: str) -> None:
    """Remove a bridge or a cable if it is there."""
    link = Path(f"/sys/class/net/{name}")
    # Look again after a failure: a cable goes down with its namespace, and the kernel may be quicker than we.
    if link.exists() and not succeeds(["ip", "link", "delete", name]) and link.exists():
        raise ClusterError(f"network link {name} cannot be removed")


def namespaces_of(prefix: str) -> list[str]:
    """The network namespaces whose name begins with ``prefix`` and a dash."""
    return sorted(path.name for path in NETNS_FOLDER.glob(f"{prefix}-*"))


def processes_in(netns: str) -> list[Process]:
    """The processes that live in a named network namespace."""
    path = NETNS_FOLDER / netns
    try:
        wanted = (os.stat(path).st_dev, os.stat(path).st_ino)
    except FileNotFoundError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            status = os.stat(f"/proc/{entry}/ns/net")
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == wanted and (process := find_process(int(entry))):
            found.append(process)
    return found


def cut(node: Node) -> None:
    """Pull the node's cable on the host's side: addresses and routes of the node stay, no socket closes."""
    run(["ip", "link", "set", node.veth, "down"])


def plug(node: Node) -> None:
    """Plug the node's cable in again."""
    run(["ip", "link", "set", node.veth, "up"])


def is_cut(node: Node) -> bool:
    """Whether the node's cable is pulled (or not there)."""
    try:
        flags = int(Path(f"/sys/class/net/{node.veth}/flags").read_text(), 16)
    except OSError:
        return True
    return not flags & 1


def check_rate(rate: str) -> str:
    """Return ``rate`` if tc(8) understands it as a bandwidth."""
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmg]?(bit|bps)", rate):
        raise Refused(f"RATE {rate!r}: give a bandwidth as tc(8) does, such as 400mbit or 50mbps")
    return rate


def slow(node: Node, rate: str) -> None:
    """Limit the node's cable to ``rate`` in both directions."""
    shape = ["root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
    run(["tc", "qdisc", "replace", "dev", node.veth, *shape])
    run([*inside(node), "tc", "qdisc", "replace", "dev", "eth0", *shape])


def full_speed(node: Node) -> None:
    """Lift the limit of ``slow``, if there is one."""
    for where, device in ([], node.veth), (inside(node), "eth0"):
        if limit_of(where, device):
            run([*where, "tc", "qdisc", "delete", "dev", device, "root"])


def limit_of(where: list[str], device: str) -> str:
    """The bandwidth limit on a device, in tc's words, or an empty string."""
    if match := re.search(r"qdisc tbf .*? rate (\S+)", run([*where, "tc", "qdisc", "show", "dev", device])):
        return match[1]
    return ""


def overlapping_routes(ranges: list[str]) -> list[str]:
    """Routes of the host (the default route aside) that lie in one of the address ranges."""
    wanted = [ip_network(text) for text in ranges]
    routes = [route.get("dst", "default") for route in json.loads(run(["ip", "-json", "-4", "route", "show"]) or "[]")]
    return [dst for dst in routes if dst != "default" and any(ip_network(dst).overlaps(net) for net in wanted)]


def _batch(lines: list[str], netns: str = "") -> None:
    where = ["-n", netns] if netns else []
    run(["ip", *where, "-batch", "-"], text_in="\n".join(lines) + "\n")
