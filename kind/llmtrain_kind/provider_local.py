"""The `local` provider: see the modules in llmtrain_kind/local."""

import http.client
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llmtrain_kind import catalogue, processes, programs, slots
from llmtrain_kind import settings as settings_file
from llmtrain_kind.archives import Archive
from llmtrain_kind.console import phase, say
from llmtrain_kind.errors import ClusterError, Refused
from llmtrain_kind.local import (
    cgroups,
    configs,
    control_plane,
    host_changes,
    host_check,
    loading,
    network,
    nodes,
    pause_image,
    pki,
    pods,
    sweep,
)
from llmtrain_kind.local.api import Api
from llmtrain_kind.local.layout import Layout, Node
from llmtrain_kind.provider import CONTROL_PLANE, IMAGE_NOTE
from llmtrain_kind.settings import ClusterSettings
from llmtrain_kind.shell import run


class LocalProvider:
    """A local cluster."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings

    @property
    def _layout(self) -> Layout:
        return Layout(self._settings, programs.bin_folder(self._settings.kubernetes))

    @property
    def _complete(self) -> Path:
        """Stands while the cluster is whole: written when its first start has succeeded."""
        return self._settings.state / "complete"

    def up(self, asked: ClusterSettings, recreate: bool, lock: int) -> None:
        """Start the cluster, or mend what is broken of a running one."""
        whole = self._complete.exists() and self._complete.read_text() == _boot_id()
        if whole and self._settings.asked() == asked.asked():
            self._mend(lock)
            return
        if whole and not recreate:
            raise Refused(
                f"cluster {asked.name} runs with other settings ({json.dumps(self._settings.asked())}): "
                "give the same, or --recreate, or run `kind/cluster down` first"
            )
        if self._settings.slot >= 0:
            say(f"clearing what an earlier cluster {asked.name} left")
            self.down()
        self._start_anew(asked, lock)

    def down(self) -> None:
        """Remove the cluster, its shared folder included."""
        if self._settings.slot >= 0:
            sweep.sweep(self._settings)
            # The settings last: as long as they stand, whoever comes next knows what to clear.
            sweep.remove_state(self._settings, keep=("settings.json",))
        sweep.remove_state(self._settings)
        slots.give_back(self._settings.name)
        host_changes.undo_after_last()

    def status(self) -> dict[str, Any]:
        """See the README for the fields."""
        layout = self._layout
        ready = _ready_nodes(layout)
        return {
            "complete": self._complete.exists(),
            "kubeconfig": str(layout.admin_kubeconfig),
            "nodes": [self._node_status(node, ready) for node in layout.nodes],
            "sharedDir": str(layout.shared),
            "sharedDirOnNodes": str(layout.shared),
            "auditLog": str(layout.audit_log),
            "logs": str(layout.audit_log.parent),
            "binDir": str(layout.programs),
            "kubernetesVersion": layout.settings.kubernetes,
            "images": IMAGE_NOTE,
            "nodePids": {node.name: _pids(node.record, nodes.COMPONENTS) for node in layout.nodes},
            "controlPlanePids": _pids(layout.record, control_plane.COMPONENTS),
        }

    def load(self, archives: list[Archive]) -> int:
        """Load image archives."""
        self._need_whole()
        return loading.load(self._layout, archives)

    def kubeconfig(self) -> Path:
        """Path of the kubeconfig; the cluster must be up."""
        self._need_whole()
        return self._layout.admin_kubeconfig

    def node(self, name: str, verb: str, rate: str, lock: int) -> None:
        """Fault and mend a node or the control plane."""
        self._need_whole()
        if name == CONTROL_PLANE:
            self._control_plane(verb, lock)
            return
        node = self._find_node(name)
        if verb == "kill":
            nodes.kill(node, cgroups.find())
        elif verb == "start":
            self._start_nodes([node], lock)
        elif not nodes.alive(node):
            raise Refused(f"{name} does not run: start it first (kind/cluster node {name} start)")
        elif verb == "cut":
            network.cut(node)
        elif verb == "heal":
            network.plug(node)
            network.full_speed(node)
        else:
            network.slow(node, network.check_rate(rate))

    def pod_pid(self, namespace: str, pod: str, container: str) -> int:
        """Read from the state of the node's containerd."""
        self._need_whole()
        return pods.init_pid(self._layout, namespace, pod, container)

    def _start_anew(self, asked: ClusterSettings, lock: int) -> None:
        with phase("programs"):
            programs.ensure(catalogue.local_programs(), asked.kubernetes)
        with phase("this machine"):
            host_check.check(install=True)
        self._settings = replace(asked, slot=slots.take(asked.name, sweep.slot_is_free))
        settings_file.save(self._settings)
        try:
            host_changes.remember(list(nodes.PRIVATE_FOLDERS.values()))
            self._start(lock)
        except BaseException:
            logs = self._keep_logs()
            self.down()
            say(f"the start failed, all of it is cleared away again; its logs: {logs or 'could not be kept'}")
            raise

    def _start(self, lock: int) -> None:
        layout = self._layout
        with phase("keys and settings"):
            layout.shared.mkdir(parents=True)
            layout.shared.chmod(0o1777)
            layout.audit_log.parent.mkdir()
            pki.make_all(layout)
            control_plane.write_configs(layout)
            pause_image.write(layout.programs / "pause", layout.state / "pause.tar")
            default_spec = run([layout.programs / "ctr", "oci", "spec"])
            configs.write(layout.state / "container.json", configs.container_spec(default_spec, layout.settings.mounts))
        with phase("network and control plane"):
            network.make_bridge(layout)
            prepare = self._node_preparation()

            def make(node: Node) -> None:
                prepare(node)
                nodes.start_runtime(node, lock)

            _at_once(
                partial(control_plane.start_api, layout, lock),
                *(partial(make, node) for node in layout.nodes),
            )
        with phase(f"{len(layout.nodes)} nodes Ready"):
            _at_once(
                partial(control_plane.start_rest, layout, lock),
                *(partial(nodes.start_agents, node, lock) for node in layout.nodes),
            )
            self._wait_usable()
            nodes.wait_ready(layout, layout.nodes)
        self._complete.write_text(_boot_id())

    def _mend(self, lock: int) -> None:
        layout = self._layout
        control_plane.start_api(layout, lock)
        control_plane.start_rest(layout, lock)
        broken = [node for node in layout.nodes if not nodes.alive(node)]
        if broken:
            say(f"starting {', '.join(node.name for node in broken)} again")
            self._start_nodes(broken, lock)
        for node in layout.nodes:
            network.plug(node)
            network.full_speed(node)
        nodes.wait_ready(layout, layout.nodes)

    def _start_nodes(self, chosen: list[Node], lock: int) -> None:
        prepare = self._node_preparation()
        trees = cgroups.find()

        def start(node: Node) -> None:
            if not nodes.alive(node):
                nodes.kill(node, trees)
                nodes.forget_ready(node)
                prepare(node)
            nodes.start_runtime(node, lock)
            nodes.start_agents(node, lock)

        _at_once(*(partial(start, node) for node in chosen))
        nodes.wait_ready(self._layout, tuple(chosen))

    def _node_preparation(self) -> Callable[[Node], None]:
        trees = cgroups.find()
        snapshotter = host_check.snapshotter(self._settings.state)
        return lambda node: nodes.prepare(node, trees, snapshotter)

    def _wait_usable(self) -> None:
        """Wait for what a pod needs besides a node: its namespace's service account, and names."""
        layout = self._layout
        api = Api(layout)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        certificate = "/api/v1/namespaces/default/configmaps/kube-root-ca.crt"
        control_plane.wait(
            layout,
            "the default service account",
            ("apiserver", "controller-manager", "scheduler"),
            lambda: api.exists(account) and api.exists(certificate),
        )
        control_plane.wait(layout, "DNS", ("coredns",), lambda: _dns_ready(layout))

    def _control_plane(self, verb: str, lock: int) -> None:
        layout = self._layout
        if verb == "kill":
            records = [processes.read_record(layout.record(component)) for component in control_plane.SERVING]
            processes.end_all(record for record in records if record)
        elif verb == "start":
            control_plane.start_api(layout, lock)
            control_plane.start_rest(layout, lock)
        else:
            raise Refused(f"{CONTROL_PLANE} {verb}: only kill and start; the others are for nodes")

    def _find_node(self, name: str) -> Node:
        for node in self._layout.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self._layout.nodes)
        raise Refused(f"node {name!r}: there are {known} and {CONTROL_PLANE}")

    def _need_whole(self) -> None:
        if not self._complete.exists():
            raise ClusterError(f"cluster {self._settings.name} is not up: run `kind/cluster up`")

    def _node_status(self, node: Node, ready: set[str]) -> dict[str, Any]:
        alive = nodes.alive(node)
        limit = network.limit_of([], node.veth) if alive else ""
        return {
            "name": node.name,
            "ready": node.name in ready,
            "running": alive,
            "cut": alive and network.is_cut(node),
            "slow": limit,
        }

    def _keep_logs(self) -> Path | None:
        kept = settings_file.failed_logs_folder(self._settings.name)
        shutil.rmtree(kept, ignore_errors=True)
        try:
            shutil.copytree(self._settings.state / "log", kept)
        except OSError:  # a full disk, or no logs yet: the clearing that follows must not depend on it
            return None
        return kept


def _at_once(*works: Callable[[], object]) -> None:
    """Run all works in threads of their own; the first error is raised when all have ended."""
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


def _pids(record: Callable[[str], Path], components: tuple[str, ...]) -> dict[str, int]:
    found = {component: processes.read_record(record(component)) for component in components}
    return {component: process.pid for component, process in found.items() if process and process.alive()}


def _ready_nodes(layout: Layout) -> set[str]:
    try:
        items = Api(layout, timeout_seconds=3).get("/api/v1/nodes")["items"]
    except (ClusterError, OSError):
        return set()
    return {
        node["metadata"]["name"]
        for node in items
        if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
    }


def _dns_ready(layout: Layout) -> bool:
    connection = http.client.HTTPConnection(layout.loopback, 8181, timeout=2)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
