"""Names, addresses and configuration files of a local cluster."""

from __future__ import annotations

import json
import tomllib
from ipaddress import ip_network
from itertools import combinations
from pathlib import Path

import pytest

from llmtrain_kind import feature_gates, slots
from llmtrain_kind.local import cgroups, configs, control_plane, mounts, network, pki
from llmtrain_kind.local.layout import Layout
from llmtrain_kind.settings import MAX_NODES, ClusterSettings
from llmtrain_kind.shell import run


def layout(slot: int = 3, nodes: int = 2, kubernetes: str = "1.36.3") -> Layout:
    return Layout(ClusterSettings("c", "local", nodes, kubernetes, slot=slot), Path("/programs"))


def test_no_two_slots_share_an_address_range() -> None:
    ranges = [
        ip_network(text)
        for cluster in (layout(slot) for slot in slots.SLOTS)
        for text in (cluster.node_range, cluster.pod_range, cluster.service_range)
    ]
    assert not [pair for pair in combinations(ranges, 2) if pair[0].overlaps(pair[1])]


def test_every_node_lies_in_the_ranges_of_its_cluster() -> None:
    cluster = layout(15, MAX_NODES)
    for node in cluster.nodes:
        assert ip_network(node.address).subnet_of(ip_network(cluster.node_range))
        assert ip_network(node.pod_range).subnet_of(ip_network(cluster.pod_range))
    assert len({node.address for node in cluster.nodes}) == MAX_NODES


def test_names_of_the_machine_fit_and_are_the_slots_own() -> None:
    cluster = layout(15, MAX_NODES)
    node = cluster.nodes[-1]
    assert max(len(name) for name in (cluster.bridge, node.veth)) <= 15
    for name in (cluster.bridge, node.veth, node.netns, node.cgroup.lstrip("/"), cluster.run.name):
        assert name.startswith("llmtrain15")
    assert len(str(node.socket)) < 100


def test_a_node_routes_to_the_pods_of_all_others() -> None:
    first, second = layout().nodes
    assert network.node_commands(first) == [
        "link set lo up",
        "addr add 10.89.3.10/24 dev eth0",
        "link set eth0 up",
        "route add default via 10.89.3.1",
        f"route add {second.pod_range} via {second.address}",
    ]


def test_containerd_reads_its_configuration() -> None:
    node = layout().nodes[1]
    parsed = tomllib.loads(configs.containerd(node, "native"))
    images = parsed["plugins"]["io.containerd.cri.v1.images"]
    runtime = parsed["plugins"]["io.containerd.cri.v1.runtime"]
    assert images["snapshotter"] == "native"
    assert runtime["netns_mounts_under_state_dir"] is True
    assert runtime["cni"]["bin_dirs"] == ["/programs"]
    assert parsed["grpc"]["address"] == str(node.socket)


@pytest.mark.parametrize("unified", [True, False], ids=["cgroup v2", "cgroup v1"])
def test_the_kubelet_is_told_to_accept_cgroup_v1_only_where_it_must(unified: bool) -> None:
    node = layout().nodes[0]
    parsed = json.loads(configs.kubelet(node, unified))
    assert parsed.get("failCgroupV1", "unset") == ("unset" if unified else False)
    assert parsed["cgroupRoot"] == "/llmtrain3/node-0"
    assert parsed["serializeImagePulls"] is False


def test_containers_start_from_the_default_spec_plus_read_only_mounts() -> None:
    default = json.dumps({"ociVersion": "1", "mounts": [{"destination": "/run"}, {"destination": "/proc"}]})
    spec = json.loads(configs.container_spec(default, (("/a", "/opt/a"),)))
    assert [mount["destination"] for mount in spec["mounts"]] == ["/proc", "/opt/a"]
    assert spec["mounts"][1] == {"destination": "/opt/a", "type": "bind", "source": "/a", "options": ["rbind", "ro"]}


@pytest.mark.parametrize(
    ("kubernetes", "gates", "served"),
    [
        pytest.param("1.34.11", "", "", id="before there was gang scheduling"),
        pytest.param(
            "1.35.4", "GenericWorkload=true,GangScheduling=true", "scheduling.k8s.io/v1alpha1=true", id="1.35"
        ),
        pytest.param(
            "1.36.3", "GenericWorkload=true,GangScheduling=true", "scheduling.k8s.io/v1alpha2=true", id="1.36"
        ),
    ],
)
def test_gang_scheduling_is_switched_on_where_it_exists(kubernetes: str, gates: str, served: str) -> None:
    assert feature_gates.as_flag(feature_gates.gates(kubernetes)) == gates
    assert feature_gates.as_flag(feature_gates.runtime_config(kubernetes)) == served
    command = [str(word) for word in control_plane.command(layout(kubernetes=kubernetes), "apiserver")]
    assert (f"--feature-gates={gates}" in command) is bool(gates)
    assert (f"--runtime-config={served}" in command) is bool(served)


def test_no_component_listens_where_another_cluster_does() -> None:
    """Ports are the same in every cluster: the addresses must differ."""
    for component in control_plane.COMPONENTS:
        first, second = (control_plane.command(layout(slot), component) for slot in (1, 2))
        listening = [str(word) for word in first if "listen" in str(word) or "bind-address" in str(word)]
        assert not set(listening) & {str(word) for word in second}, component


def test_the_audit_log_keeps_what_users_and_operators_do() -> None:
    rules = json.loads(configs.audit_policy())["rules"]
    assert rules[-1] == {"level": "Metadata"}
    for rule in rules[:-1]:
        assert rule["level"] == "None"
        assert {"users", "userGroups", "nonResourceURLs"} & rule.keys()
        assert not any(user.startswith("system:serviceaccount") for user in rule.get("users", []))


def test_certificates_say_who_a_client_is() -> None:
    subjects = {certificate.name: certificate.subject for certificate in pki.certificates(layout())}
    assert subjects["node-1"] == "/O=system:nodes/CN=system:node:node-1"
    assert subjects["admin"] == "/O=system:masters/CN=kubernetes-admin"
    assert len(subjects) == 9 + 2


def test_the_api_servers_certificate_holds_every_name_it_is_called_by() -> None:
    certificate = next(found for found in pki.certificates(layout()) if found.name == "apiserver")
    text = pki.extensions(certificate)
    for name in ("IP:10.89.3.1", "IP:10.179.0.1", "DNS:kubernetes.default.svc.cluster.local"):
        assert name in text


def test_openssl_makes_keys_and_certificates_that_verify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    cluster = layout()
    pki.make_all(cluster)
    made = [cluster.pki / f"{certificate.name}.crt" for certificate in pki.certificates(cluster)]
    answer = run(["openssl", "verify", "-CAfile", cluster.pki / "ca.crt", *made])
    assert answer.count(": OK") == len(made)
    serials = {run(["openssl", "x509", "-noout", "-serial", "-in", path]) for path in made}
    assert len(serials) == len(made)
    assert cluster.pki.stat().st_mode & 0o077 == 0


MOUNTS_V1 = """\
tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
"""


def test_hierarchies_are_told_apart_by_their_version() -> None:
    first, second = "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/memory"
    assert cgroups.hierarchies(MOUNTS_V1, "cgroup") == (Path(first), Path(second))
    assert cgroups.hierarchies(MOUNTS_V1, "cgroup2") == (Path("/sys/fs/cgroup/unified"),)


def test_version_2_switches_controllers_on_from_the_root_down(tmp_path: Path) -> None:
    """On plain files: what is written where (the kernel's own answer needs a version 2 host)."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    for part in ("llmtrain3", "llmtrain3/node-0"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "cgroup.controllers").write_text("cpu memory pids\n")
        (tmp_path / part / "cgroup.subtree_control").write_text("\n")
    cgroups.Cgroups(True, (tmp_path,), (tmp_path,)).make("/llmtrain3/node-0")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "llmtrain3/cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (tmp_path / "llmtrain3/node-0/cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_version_1_fills_in_the_cpus_and_memory_nodes(tmp_path: Path) -> None:
    for part in (".", "llmtrain3", "llmtrain3/node-0"):
        (tmp_path / part).mkdir(exist_ok=True)
        for name, value in (("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n")):
            (tmp_path / part / name).write_text(value if part == "." else "")
    cgroups.Cgroups(False, (tmp_path,), (tmp_path,)).make("/llmtrain3/node-0")
    assert (tmp_path / "llmtrain3/node-0/cpuset.cpus").read_text() == "0-1\n"
    assert (tmp_path / "llmtrain3/node-0/cpuset.mems").read_text() == "0\n"


def test_mount_points_with_blanks_are_read() -> None:
    line = r"36 35 98:0 /mnt1 /mnt/two\040words rw,noatime master:1 - ext3 /dev/root rw"
    assert mounts.mount_points(line) == ["/mnt/two words"]
