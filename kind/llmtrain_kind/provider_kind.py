"""The `kind` provider: nodes are Docker containers, made by sigs.k8s.io/kind."""

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from llmtrain_kind import kind_config, programs
from llmtrain_kind import settings as settings_file
from llmtrain_kind.archives import Archive
from llmtrain_kind.console import phase, say
from llmtrain_kind.errors import ClusterError, Refused
from llmtrain_kind.kubectl import Kubectl
from llmtrain_kind.local import configs
from llmtrain_kind.local.network import check_rate
from llmtrain_kind.local.pods import container_id
from llmtrain_kind.provider import CONTROL_PLANE, IMAGE_NOTE
from llmtrain_kind.settings import ClusterSettings
from llmtrain_kind.shell import run, succeeds

_CREATE_SECONDS = 900
_API_MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
_API_PARKED = "/etc/kubernetes/kube-apiserver.yaml"
_SPEC = "/etc/containerd/cri-base.json"
_CHAINS = (("INPUT", "-i"), ("OUTPUT", "-o"), ("FORWARD", "-i"), ("FORWARD", "-o"))


def docker_answers() -> bool:
    """Whether a Docker engine answers here."""
    return shutil.which("docker") is not None and succeeds(["docker", "info", "--format", "{{.ServerVersion}}"])


class KindProvider:
    """A kind cluster: one control plane and the asked number of workers, which are its nodes to us."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl(self.kubeconfig(), self._settings.kubernetes)

    @property
    def _complete(self) -> Path:
        return self._settings.state / "complete"

    @property
    def _audit(self) -> Path:
        return self._settings.state / "audit"

    def up(self, asked: ClusterSettings, recreate: bool, lock: int) -> None:
        """Create the cluster, or mend the nodes of a running one."""
        if self._complete.exists():
            if self._settings.asked() == asked.asked():
                self._mend()
                return
            if not recreate:
                raise Refused(
                    f"cluster {asked.name} runs with other settings ({json.dumps(self._settings.asked())}): "
                    "give the same, or --recreate, or run `kind/cluster down` first"
                )
        if self._settings.state.exists():
            self.down()
        elif asked.name in run([_kind(), "get", "clusters"]).split():
            # Else the creation would fail, and clearing up after it would delete what is somebody else's.
            raise Refused(f"--name {asked.name}: kind has a cluster of this name that is not ours; give another name")
        self._settings = asked
        settings_file.save(asked)
        try:
            self._create()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Delete the cluster and its shared folder."""
        run([_kind(), "delete", "cluster", "--name", self._settings.name], timeout_seconds=300)
        shutil.rmtree(self._settings.state, ignore_errors=True)

    def status(self) -> dict[str, Any]:
        """See the README for the fields."""
        kubectl = self._kubectl
        try:
            nodes = kubectl.nodes()
        except ClusterError:
            nodes = [{"name": name, "ready": False} for name in self._workers()]
        return {
            "complete": self._complete.exists(),
            "kubeconfig": str(self.kubeconfig()),
            "nodes": [{**node, "running": _running(node["name"]), "cut": _is_cut(node["name"])} for node in nodes],
            "sharedDir": str(self._settings.state / "shared"),
            "sharedDirOnNodes": kind_config.SHARED_ON_NODES,
            "auditLog": str(self._audit / "audit.jsonl"),
            "binDir": str(kubectl.folder),
            "kubernetesVersion": re.sub(r".*:v|@.*", "", kind_config.node_image(self._settings.kubernetes)),
            "images": IMAGE_NOTE,
            "nodePids": {},
        }

    def load(self, archives: list[Archive]) -> int:
        """Load image archives by kind; what was loaded before, by content, is skipped."""
        record = self._settings.state / "loaded.json"
        loaded = json.loads(record.read_text()) if record.exists() else {}
        imports = 0
        for archive in archives:
            if all(loaded.get(name) == archive.digest for name in archive.names):
                continue
            command: list[str | Path] = [_kind(), "load", "image-archive", archive.path, "--name", self._settings.name]
            run(command, timeout_seconds=_CREATE_SECONDS)
            loaded.update(dict.fromkeys(archive.names, archive.digest))
            unfinished = record.with_suffix(".tmp")
            unfinished.write_text(json.dumps(loaded))
            unfinished.replace(record)
            imports += 1
        return imports

    def kubeconfig(self) -> Path:
        """The kubeconfig that kind wrote."""
        return self._settings.state / "kubeconfig"

    def node(self, name: str, verb: str, rate: str, lock: int) -> None:
        """Fault and mend a worker or the control plane."""
        if name == CONTROL_PLANE:
            self._control_plane(verb)
            return
        if name not in self._workers():
            raise Refused(f"node {name!r}: there are {', '.join(self._workers())} and {CONTROL_PLANE}")
        if verb == "kill":
            succeeds(["docker", "kill", name])
        elif verb == "start":
            run(["docker", "start", name])
            self._wait_ready([name])
        elif not _running(name):
            raise Refused(f"{name} does not run: start it first (kind/cluster node {name} start)")
        elif verb == "cut":
            _cut(name)
        elif verb == "heal":
            _heal(name)
        else:
            shape = ["root", "tbf", "rate", check_rate(rate), "burst", "256k", "latency", "50ms"]
            run(["docker", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", *shape])

    def pod_pid(self, namespace: str, pod: str, container: str) -> int:
        """Found by the container's id in the processes' cgroups: needs Docker's own Linux machine to be this one."""
        identity = container_id(self._kubectl.read("pod", pod, "--namespace", namespace), container)
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                cgroup = Path(f"/proc/{entry}/cgroup").read_text()
                status = Path(f"/proc/{entry}/status").read_text()
            except OSError:
                continue
            # NSpid lists the pid in every nested namespace; PID 1 of the container ends in 1.
            if identity in cgroup and re.search(r"^NSpid:.*\s1$", status, re.MULTILINE):
                return int(entry)
        raise ClusterError(f"no process of container {identity[:12]} is visible here: Docker runs on another machine")

    def _create(self) -> None:
        state = self._settings.state
        shared = state / "shared"
        shared.mkdir(parents=True)
        shared.chmod(0o1777)
        self._audit.mkdir()
        configs.write(self._audit / "policy.json", configs.audit_policy())
        config = configs.write(state / "kind.json", kind_config.render(self._settings, shared, self._audit))
        command: list[str | Path] = [_kind(), "create", "cluster", "--name", self._settings.name, "--config", config]
        with phase("kind create cluster"):
            run([*command, "--kubeconfig", self.kubeconfig(), "--wait", "180s"], timeout_seconds=_CREATE_SECONDS)
        if self._settings.mounts:
            for name in self._workers():
                self._mount_into_containers(name)
        with phase("nodes Ready"):
            self._wait_ready(self._workers())
        self._complete.touch()

    def _mend(self) -> None:
        self._control_plane("start")
        for name in self._workers():
            if not _running(name):
                say(f"starting {name} again")
                run(["docker", "start", name])
            _heal(name)
        self._wait_ready(self._workers())

    def _workers(self) -> list[str]:
        prefix = f"{self._settings.name}-worker"
        return [prefix + (str(number) if number > 1 else "") for number in range(1, self._settings.nodes + 1)]

    def _mount_into_containers(self, name: str) -> None:
        spec = run(["docker", "exec", name, "cat", _SPEC])
        mounts = tuple((kind_config.mount_on_nodes(i), dst) for i, (_, dst) in enumerate(self._settings.mounts))
        text = configs.container_spec(spec, mounts)
        run(["docker", "exec", "-i", name, "sh", "-c", f"cat > {_SPEC}"], text_in=text)
        run(["docker", "exec", name, "systemctl", "restart", "containerd"])

    def _wait_ready(self, names: list[str]) -> None:
        kubectl = self._kubectl
        nodes = [f"node/{name}" for name in names]
        deadline = time.monotonic() + 180
        while not succeeds(["docker", "exec", names[0], "true"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        kubectl.run("wait", "--for=condition=Ready", "--timeout=180s", "--request-timeout=0", *nodes)
        for node in nodes:
            kubectl.run("patch", node, "--subresource=status", "--type=merge", "-p", json.dumps(configs.gpus()))

    def _control_plane(self, verb: str) -> None:
        name = f"{self._settings.name}-control-plane"
        if verb not in ("kill", "start"):
            raise Refused(f"{CONTROL_PLANE} {verb}: only kill and start; the others are for nodes")
        source, target = (_API_MANIFEST, _API_PARKED) if verb == "kill" else (_API_PARKED, _API_MANIFEST)
        # The kubelet runs what lies in the manifests folder: take it out and the API server ends.
        run(["docker", "exec", name, "sh", "-c", f"if [ -e {source} ]; then mv {source} {target}; fi"])
        deadline = time.monotonic() + 120
        while self._api_answers() != (verb == "start"):
            if time.monotonic() > deadline:
                raise ClusterError(f"{CONTROL_PLANE} {verb}: the API server has not followed after 120 s")
            time.sleep(0.2)

    def _api_answers(self) -> bool:
        try:
            self._kubectl.run("get", "--raw", "/readyz")
        except ClusterError:
            return False
        return True


def _kind() -> Path:
    """The kind command: our own version, since the node images belong to it."""
    return programs.ensure(("kind",)) / "kind"


def _running(name: str) -> bool:
    return succeeds(["docker", "exec", name, "true"])


def _is_cut(name: str) -> bool:
    return succeeds(["docker", "exec", name, "iptables", "-C", "INPUT", "-i", "eth0", "-j", "DROP"])


def _cut(name: str) -> None:
    for chain, way in _CHAINS:
        rule = [chain, way, "eth0", "-j", "DROP"]
        if not succeeds(["docker", "exec", name, "iptables", "-C", *rule]):
            run(["docker", "exec", name, "iptables", "-I", *rule])


def _heal(name: str) -> None:
    for chain, way in _CHAINS:
        rule = [chain, way, "eth0", "-j", "DROP"]
        while succeeds(["docker", "exec", name, "iptables", "-D", *rule]):
            continue
    if "tbf" in run(["docker", "exec", name, "tc", "qdisc", "show", "dev", "eth0"]):
        run(["docker", "exec", name, "tc", "qdisc", "delete", "dev", "eth0", "root"])
