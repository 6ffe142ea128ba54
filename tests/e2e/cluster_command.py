"""The command kind/cluster as a test uses it, and what a cluster of the `local` provider leaves on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, str(Path(__file__).resolve().parents[2] / "kind" / "cluster"))

#: The host's own programs reach the pods of these tests by mounts: no image has to be made.
HOST_PROGRAMS = tuple(folder for folder in ("/usr", "/bin", "/lib", "/lib64") if os.path.exists(folder))
PAUSE_IMAGE = "localhost/llmtrain-pause:1"


def call(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run kind/cluster, whatever it says."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 90) -> None:
    """Wait until a condition holds; fail naming it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting for {what}"
        time.sleep(0.1)


class Cluster:
    """One cluster by its name."""

    def __init__(self, name: str, provider: str) -> None:
        self.name = name
        self.provider = provider
        self._kubectl: list[str] = []

    def run(self, *arguments: str) -> str:
        """Run a command on this cluster; it must succeed. Returns stdout."""
        done = call(arguments[0], "--name", self.name, *arguments[1:])
        assert done.returncode == 0, f"kind/cluster {' '.join(arguments)}: {done.returncode}\n{done.stderr}"
        return done.stdout

    def up(self, *arguments: str) -> str:
        """Bring it up; returns what the command said."""
        command = ["up", "--name", self.name, "--provider", self.provider, *arguments]
        done = call(*command)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def status(self) -> dict[str, Any]:
        """All facts."""
        return dict(json.loads(self.run("status", "--json")))

    def node(self, name: str) -> dict[str, Any]:
        """The facts of one node."""
        return next(node for node in self.status()["nodes"] if node["name"] == name)

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator; returns stdout."""
        if not self._kubectl:
            facts = self.status()
            self._kubectl = [f"{facts['binDir']}/kubectl", "--kubeconfig", facts["kubeconfig"], "--request-timeout=30s"]
        done = subprocess.run([*self._kubectl, *arguments], input=stdin, capture_output=True, text=True, timeout=120)
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def read(self, *arguments: str) -> dict[str, Any]:
        """The parsed answer of `kubectl get`."""
        return dict(json.loads(self.kubectl("get", *arguments, "-o", "json")))

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Create or update objects."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))

    def wait_ready(self, *pods: str) -> None:
        """Wait until pods are Ready."""
        self.kubectl("wait", "--for=condition=Ready", "--timeout=60s", *(f"pod/{pod}" for pod in pods))

    def inside(self, pod: str, script: str, check: bool = True) -> str:
        """Run a bash script in a pod; returns stdout."""
        return self.kubectl("exec", pod, "--", "bash", "-c", script, check=check)


def pod(name: str, node: str, *command: str, **spec: Any) -> dict[str, Any]:
    """A pod on a node that runs a program of the host."""
    container = {"name": "main", "image": PAUSE_IMAGE, "imagePullPolicy": "IfNotPresent", **spec.pop("container", {})}
    if command:
        container["command"] = list(command)
    grace = {"terminationGracePeriodSeconds": 0}
    place = {"nodeName": node} if node else {}
    metadata = {"name": name, "labels": {"app": name}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**place, **grace, "containers": [container], **spec},
    }


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def state_folder(name: str) -> Path:
    """The state folder of a cluster."""
    root = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(root) / "llmtrain" / "clusters" / name


def slot_of(name: str) -> int | None:
    """The slot of a cluster in the registry, which decides all names on the machine."""
    try:
        return dict(json.loads((state_folder(name).parent / ".slots.json").read_text())).get(name)
    except FileNotFoundError:
        return None


def traces(name: str, slot: int) -> list[str]:
    """Everything of a local cluster that can be seen on this machine: empty when it is gone."""
    prefix, state = f"llmtrain{slot}", str(state_folder(name))
    marks = (f"/{prefix}/", f"{prefix}-node-", f"{state}/")
    found = [f"process {pid}: {words}" for pid, words in _processes() if any(mark in words for mark in marks)]
    for file in ("/proc/self/mountinfo", "/proc/net/route"):
        found += [f"{file}: {line}" for line in Path(file).read_text().splitlines() if any(m in line for m in marks)]
    found += [f"link {path.name}" for path in Path("/sys/class/net").iterdir() if _is_own(path.name, prefix)]
    found += [f"netns {path}" for path in Path("/run/netns").glob(f"{prefix}-*")]
    found += [f"cgroup {path}" for path in Path("/sys/fs/cgroup").glob(f"**/{prefix}") if path.is_dir()]
    found += [str(path) for path in (Path("/run") / prefix, state_folder(name)) if path.exists()]
    if slot_of(name) is not None:
        found.append(f"slot of {name}")
    return found


def host_rules() -> str:
    """All packet filter rules of the host."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, env={"PATH": path}).stdout


def _is_own(link: str, prefix: str) -> bool:
    return link == prefix or link.startswith(f"{prefix}n")


def _processes() -> list[tuple[int, str]]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if not words:
                continue  # a zombie, which its parent has yet to bury, or the kernel's own
            words += Path(f"/proc/{entry}/cgroup").read_text()
        except OSError:
            continue
        if int(entry) != os.getpid():
            found.append((int(entry), words))
    return found
