"""The test cluster itself: kind/cluster on this machine, in the order in which a cluster lives."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain_kind.local import pause_image
from tests.e2e.cluster_command import (
    COMMAND,
    HOST_PROGRAMS,
    Cluster,
    call,
    host_rules,
    is_running,
    pod,
    slot_of,
    state_folder,
    traces,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

MOUNTS = [word for folder in HOST_PROGRAMS for word in ("--mount", f"{folder}:{folder}")]
SERVER = ("perl", "-MIO::Socket::INET", "-e")
ANSWER_HELLO = (
    "$|=1; $s=IO::Socket::INET->new(LocalPort=>8000,Listen=>9,ReuseAddr=>1); print qq(listening\\n);"
    "while($c=$s->accept()){print $c qq(hello\\n); close $c}"
)
#: Sends as much as it is asked for, to measure the way.
SEND_FOUR_MEGABYTES = (
    "$s=IO::Socket::INET->new(LocalPort=>8000,Listen=>9,ReuseAddr=>1);"
    "while($c=$s->accept()){print $c (q(x) x 4194304); close $c}"
)


@pytest.fixture(scope="module")
def provider() -> str:
    """The provider that this machine has."""
    done = call("check")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.fixture(scope="module")
def cluster(provider: str) -> Iterator[Cluster]:
    """A cluster of two nodes whose containers see the host's programs."""
    made = Cluster(f"self-{os.getpid()}", provider)
    try:
        made.up("--nodes", "2", *MOUNTS)
        yield made
    finally:
        made.run("down")


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> list[str]:
    """The names of its nodes."""
    return [node["name"] for node in cluster.status()["nodes"]]


@pytest.fixture
def spare(provider: str) -> Iterator[Cluster]:
    """A name for one more cluster, for tests of the `local` provider's own life."""
    if provider != "local":
        pytest.skip(f"tests the local provider; this machine uses {provider}")
    made = Cluster(f"spare-{os.getpid()}", "local")
    try:
        yield made
    finally:
        made.run("down")


def test_nodes_are_ready_and_have_eight_gpus(cluster: Cluster) -> None:
    facts = cluster.status()
    assert [node["ready"] for node in facts["nodes"]] == [True, True]
    for node in facts["nodes"]:
        assert cluster.read("node", node["name"])["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert facts["kubernetesVersion"].startswith("1.36.")


def test_a_second_up_changes_nothing(cluster: Cluster) -> None:
    before = cluster.status()
    cluster.up("--nodes", "2", *MOUNTS)
    assert cluster.status() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["up", "--nodes", "3"], "runs with other settings", id="other settings than the running cluster"),
        pytest.param(["up", "--nodes", "17"], "1 to 16 nodes", id="too many nodes"),
        pytest.param(["up", "--kubernetes", "1.36"], "give a full version", id="half a version"),
        pytest.param(["up", "--mount", "/nowhere:/x"], "/nowhere is not there", id="mount of nothing"),
        pytest.param(["node", "node-77", "kill"], "node 'node-77': there are", id="unknown node"),
        pytest.param(["node", "control-plane", "cut"], "only kill and start", id="cut of the control plane"),
        pytest.param(["node", "NODE", "slow"], "RATE belongs to slow", id="slow without a rate"),
        pytest.param(["node", "NODE", "slow", "fast"], "a bandwidth as tc(8)", id="a rate that is none"),
        pytest.param(["load", __file__], "not an image archive", id="load of a text"),
        pytest.param(["pod-pid", "default", "nobody"], "nobody", id="pid of an unknown pod"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(
    cluster: Cluster, nodes: list[str], arguments: list[str], message: str
) -> None:
    words = [nodes[0] if word == "NODE" else word for word in arguments]
    done = call(words[0], "--name", cluster.name, *words[1:])
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_pods_meet_by_name_service_and_shared_folder(cluster: Cluster, nodes: list[str]) -> None:
    shared = [{"name": "shared", "hostPath": {"path": cluster.status()["sharedDirOnNodes"]}}]
    seen = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "hello"}}
    ports = [{"port": 80, "targetPort": 8000}]
    cluster.apply(
        {**service, "spec": {"selector": {"app": "server"}, "ports": ports}},
        pod("server", nodes[0], *SERVER, ANSWER_HELLO, volumes=shared, container=seen),
        pod("client", nodes[1], "sleep", "inf", volumes=shared, container=seen),
    )
    cluster.wait_ready("server", "client")
    address = cluster.read("pod", "server")["status"]["podIP"]
    wait_for("the server", lambda: "listening" in cluster.kubectl("logs", "server"))
    assert cluster.inside("client", f"cat < /dev/tcp/{address}/8000") == "hello\n"
    wait_for("the service", lambda: cluster.inside("client", "cat < /dev/tcp/hello/80", check=False) == "hello\n")
    # A pod that calls a service and is answered by itself: the packet must turn round at the bridge.
    assert cluster.inside("server", "cat < /dev/tcp/hello.default.svc.cluster.local/80") == "hello\n"
    cluster.inside("server", "echo from-node-0 > /shared/note")
    assert cluster.inside("client", "cat /shared/note") == "from-node-0\n"
    assert (Path(cluster.status()["sharedDir"]) / "note").read_text() == "from-node-0\n"


def test_a_pod_killed_from_outside_fails_with_137(cluster: Cluster, nodes: list[str]) -> None:
    cluster.apply(pod("victim", nodes[0], "sleep", "inf", restartPolicy="Never"))
    cluster.wait_ready("victim")
    pid = int(cluster.run("pod-pid", "default", "victim"))
    assert Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\0inf\0"
    os.kill(pid, signal.SIGKILL)
    wait_for("the pod to fail", lambda: cluster.read("pod", "victim")["status"]["phase"] == "Failed")
    state = cluster.read("pod", "victim")["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["exitCode"] == 137


def test_an_image_is_loaded_once_and_runs(cluster: Cluster, nodes: list[str], tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    program = Path(cluster.status()["binDir"]) / "pause"
    if not program.exists():
        subprocess.run([*COMMAND, "programs", "--only", "pause"], check=True, timeout=240)
    pause_image.write(program, archive, "localhost/loaded:1")
    assert "imported" in call("load", "--name", cluster.name, str(archive)).stderr
    assert "there already" in call("load", "--name", cluster.name, str(archive)).stderr
    image = {"image": "localhost/loaded:1", "imagePullPolicy": "Never"}
    cluster.apply(*(pod(f"loaded-{i}", node, container=image) for i, node in enumerate(nodes)))
    cluster.wait_ready("loaded-0", "loaded-1")


def test_a_gang_that_does_not_fit_starts_none_of_its_pods(cluster: Cluster) -> None:
    gang = {"schedulingPolicy": {"gang": {"minCount": 3}}}
    group = {"apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "PodGroup", "metadata": {"name": "gang"}, "spec": gang}
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    member = {"schedulingGroup": {"podGroupName": "gang"}}
    cluster.apply(group, *(pod(f"member-{i}", "", container=gpus, **member) for i in range(3)))

    def refused() -> bool:
        pods = [cluster.read("pod", f"member-{i}") for i in range(3)]
        assert not any(found["spec"].get("nodeName") for found in pods)
        conditions = [c for found in pods for c in found["status"].get("conditions", [])]
        return sum(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions) == 3

    wait_for("the scheduler's answer", refused)
    cluster.kubectl("delete", "pod", "member-0", "member-1", "member-2", "--force")


def test_a_cut_node_is_out_of_reach_until_it_is_healed(cluster: Cluster, nodes: list[str]) -> None:
    address = cluster.read("pod", "server")["status"]["podIP"]
    ask = f"timeout 2 cat < /dev/tcp/{address}/8000"
    cluster.run("node", nodes[0], "cut")
    assert cluster.node(nodes[0])["cut"]
    assert cluster.inside("client", f"timeout 2 bash -c '{ask}' || echo silence") == "silence\n"
    cluster.run("node", nodes[0], "heal")
    wait_for("the healed node", lambda: cluster.inside("client", ask, check=False) == "hello\n")
    assert not cluster.node(nodes[0])["cut"]


def test_a_slow_node_lets_no_more_through_than_its_rate(cluster: Cluster, nodes: list[str]) -> None:
    cluster.apply(pod("sender", nodes[0], *SERVER, SEND_FOUR_MEGABYTES))
    cluster.wait_ready("sender")
    address = cluster.read("pod", "sender")["status"]["podIP"]
    count = f"cat < /dev/tcp/{address}/8000 | wc -c"
    wait_for("the sender", lambda: cluster.inside("client", count, check=False) == "4194304\n")
    cluster.run("node", nodes[0], "slow", "16mbit")
    start = time.monotonic()
    assert cluster.inside("client", count) == "4194304\n"
    # 4 MiB at 16 Mbit/s take 2.1 s, less the burst of 256 KiB; a loaded machine can only be slower.
    assert time.monotonic() - start > 1.8
    cluster.run("node", nodes[0], "heal")
    assert not cluster.node(nodes[0]).get("slow")


def test_the_control_plane_stops_and_starts_under_running_pods(cluster: Cluster) -> None:
    before = cluster.read("pod", "server")["status"]["containerStatuses"][0]
    pid = int(cluster.run("pod-pid", "default", "server"))
    cluster.run("node", "control-plane", "kill")
    assert cluster.kubectl("get", "--raw", "/readyz", check=False) == ""
    assert is_running(pid)
    cluster.run("node", "control-plane", "start")
    assert cluster.kubectl("get", "--raw", "/readyz") == "ok"
    assert cluster.read("pod", "server")["status"]["containerStatuses"][0]["containerID"] == before["containerID"]


def test_a_killed_node_ends_its_pods_and_comes_back(cluster: Cluster, nodes: list[str]) -> None:
    pid = int(cluster.run("pod-pid", "default", "server"))
    before = cluster.read("pod", "server")["status"]["containerStatuses"][0]["containerID"]
    cluster.run("node", nodes[0], "kill")
    # PID 1 of the machine may take a while to bury it, but its memory and its program are gone.
    assert not is_running(pid)
    assert not cluster.node(nodes[0])["running"]
    wait_for("the loss to be noticed", lambda: not cluster.node(nodes[0])["ready"])
    done = call("node", "--name", cluster.name, nodes[0], "cut")
    assert done.returncode == 2 and "start it first" in done.stderr
    cluster.run("node", nodes[0], "start")
    assert cluster.node(nodes[0])["ready"]
    assert cluster.read("node", nodes[0])["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    status = lambda: cluster.read("pod", "server")["status"]  # noqa: E731
    wait_for(
        "the pod to run anew",
        lambda: (
            status()["containerStatuses"][0]["containerID"] != before
            and "running" in status()["containerStatuses"][0]["state"]
        ),
    )
    # The cluster mends its nodes itself, too.
    cluster.run("node", nodes[1], "kill")
    cluster.up("--nodes", "2", *MOUNTS)
    assert [node["ready"] for node in cluster.status()["nodes"]] == [True, True]


def test_the_audit_log_tells_who_wrote_what(cluster: Cluster) -> None:
    cluster.kubectl("create", "configmap", "audited")

    def lines() -> list[dict[str, object]]:
        found = map(json.loads, Path(cluster.status()["auditLog"]).read_text().splitlines())
        return [line for line in found if line.get("objectRef", {}).get("name") == "audited"]

    wait_for("the audit line", lambda: bool(lines()))
    assert [line["verb"] for line in lines()] == ["create"]


def test_a_start_killed_at_any_moment_leaves_nothing_that_down_or_up_cannot_clear(
    spare: Cluster, cluster: Cluster
) -> None:
    moments = random.Random()
    seed = int(time.time())
    moments.seed(seed)
    rules = host_rules()
    for _ in range(3):
        start = subprocess.Popen(
            [*COMMAND, "up", "--name", spare.name, "--provider", "local", "--nodes", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        after = moments.uniform(0.1, 6)
        try:
            start.wait(after)
        except subprocess.TimeoutExpired:
            start.kill()
        start.wait()
        slot = slot_of(spare.name)
        spare.run("down")
        if slot is not None:
            assert traces(spare.name, slot) == [], f"seed {seed}, killed after {after:.2f} s"
    start = subprocess.Popen([*COMMAND, "up", "--name", spare.name, "--provider", "local", "--nodes", "1"])
    time.sleep(moments.uniform(0.5, 4))
    start.kill()
    start.wait()
    spare.up("--nodes", "1")
    # Two clusters side by side, and the first has not noticed.
    spare.apply(pod("alone", spare.status()["nodes"][0]["name"]))
    spare.wait_ready("alone")
    assert slot_of(spare.name) != slot_of(cluster.name)
    assert all(node["ready"] for node in cluster.status()["nodes"])
    slot = slot_of(spare.name)
    assert slot is not None and traces(spare.name, slot) != []
    spare.run("down")
    spare.run("down")
    assert traces(spare.name, slot) == []
    assert host_rules() == rules


def test_a_failed_start_shows_the_log_and_cleans_up(spare: Cluster) -> None:
    # Somebody has etcd's port on every address that a new cluster could get.
    taken = []
    for slot in range(16):
        listener = socket.socket()
        # Else the closed connections of a cluster that had the slot before stand in the way.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((f"127.89.{slot}.1", 2379))
        except OSError:
            continue  # the etcd of a running cluster
        listener.listen()
        taken.append(listener)
    try:
        done = call("up", "--name", spare.name, "--provider", "local", "--nodes", "1")
    finally:
        for listener in taken:
            listener.close()
    assert done.returncode == 1
    assert "etcd has ended" in done.stderr and "address already in use" in done.stderr
    assert slot_of(spare.name) is None
    assert not state_folder(spare.name).exists()
    assert (state_folder(spare.name).with_name(f"{spare.name}.failed-logs") / "etcd.log").exists()
