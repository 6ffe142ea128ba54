"""One driver for everything that uses a test cluster from outside: the demo, the e2e tests, the benchmarks.

It speaks to the cluster as a user does (kubectl, helm, manifests), reads what training wrote to the shared store, and
hurts the job the way machines do.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER_COMMAND = REPOSITORY / "kind" / "cluster"
OPERATOR_NAMESPACE = "llmtrain-system"
OPERATOR_SELECTOR = "app.kubernetes.io/name=llmtrain"
OPERATOR_IMAGE = "localhost/llmtrain-operator"
TRAINER_IMAGE = "localhost/llmtrain-trainer:dev"

# Runs inside a worker: finds a rank by the name its process carries and reports the moment of the kill.
KILL_RANK = """
import os, sys, time
name = "ltrank-" + sys.argv[1]
for entry in os.listdir("/proc"):
    if entry.isdigit():
        try:
            comm = open(f"/proc/{entry}/comm").read().strip()
        except OSError:
            continue
        if comm == name:
            now = time.time()
            os.kill(int(entry), int(sys.argv[2]))
            print(now)
            sys.exit(0)
sys.exit(f"no process {name}")
"""


class DriverError(Exception):
    """A command failed or a wait ran out; the message says which, with its output."""


@dataclass(frozen=True)
class StepLine:
    """One line of a job's metrics.jsonl."""

    attempt: int
    step: int
    loss: float
    time: float


def run(*command: str, stdin: str | None = None, timeout: float = 600, check: bool = True) -> str:
    """Run a command and return its standard output.

    Raises:
        DriverError: it failed (and `check` is true) or ran longer than `timeout` seconds.
    """
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise DriverError(f"{' '.join(command)}: no end after {timeout:.0f} s") from error
    if check and done.returncode != 0:
        raise DriverError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr.strip()}\n{done.stdout.strip()}")
    return done.stdout


class Driver:
    """A test cluster seen from outside."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        facts = json.loads(run(str(CLUSTER_COMMAND), "status", "--name", cluster, "--json"))
        self.kubeconfig: str = facts["kubeconfig"]
        self.shared = Path(facts["sharedDir"])
        self.shared_on_nodes: str = facts["sharedDirOnNodes"]
        self.audit_log: str | None = facts.get("auditLog")
        self.provider: str = facts["provider"]
        self.nodes: list[str] = [node["name"] for node in facts["nodes"]]
        self._bin = Path(facts["binDir"])

    # --- commands

    def command(self, *arguments: str) -> list[str]:
        """Return the kubectl command line, for what has to run beside everything else."""
        return [str(self._bin / "kubectl"), "--kubeconfig", self.kubeconfig, *arguments]

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 120, check: bool = True) -> str:
        return run(*self.command(*arguments), stdin=stdin, timeout=timeout, check=check)

    def helm(self, *arguments: str, timeout: float = 300) -> str:
        return run(str(self._bin / "helm"), "--kubeconfig", self.kubeconfig, *arguments, timeout=timeout)

    def fault(self, *arguments: str) -> str:
        """Run a fault verb of the cluster command, for instance ("node", "node1", "cut")."""
        return run(str(CLUSTER_COMMAND), arguments[0], "--name", self.cluster, *arguments[1:])

    def apply(self, *objects: dict[str, Any]) -> None:
        """Server-side apply."""
        bundle = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(bundle))

    # --- setting the stage

    def install_operator(self, *settings: str) -> None:
        """Install or upgrade the operator by its chart, in a namespace that enforces Pod Security 'restricted'."""
        self.apply(namespace_object(OPERATOR_NAMESPACE))
        chart = str(REPOSITORY / "charts" / "llmtrain")
        values = [f"image.repository={OPERATOR_IMAGE}", "image.tag=dev", *settings]
        flags = [part for value in values for part in ("--set", value)]
        self.helm(
            "upgrade", "--install", "llmtrain", chart, "-n", OPERATOR_NAMESPACE, "--wait", "--timeout", "120s", *flags
        )

    def prepare_namespace(self, namespace: str, claim: str = "checkpoints") -> Path:
        """Make a namespace (Pod Security 'restricted') with a claim on a folder all nodes share; return that folder."""
        folder = self.shared / namespace
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        self.apply(namespace_object(namespace), *shared_volume(namespace, claim, f"{self.shared_on_nodes}/{namespace}"))
        return folder

    # --- reading

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.kubectl("get", "ltj", name, "-n", namespace, "-o", "json"))
        return result

    def state(self, namespace: str, name: str) -> str:
        return str(self.job(namespace, name).get("status", {}).get("state", ""))

    def workers(self, namespace: str, name: str) -> dict[int, str]:
        """Return worker index to the name of its newest pod that is neither ended nor being deleted."""
        selector = f"llmtrain.dev/job={name}"
        pods = json.loads(self.kubectl("get", "pods", "-n", namespace, "-l", selector, "-o", "json"))["items"]
        live = [
            pod
            for pod in pods
            if not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") not in ("Failed", "Succeeded")
        ]
        live.sort(key=lambda pod: int(pod["metadata"]["labels"]["llmtrain.dev/attempt"]))
        return {int(pod["metadata"]["labels"]["llmtrain.dev/worker"]): pod["metadata"]["name"] for pod in live}

    def wait(self, what: str, condition: Callable[[], Any], timeout: float = 120, period: float = 0.2) -> Any:
        """Wait until `condition()` is true and return its value.

        Raises:
            DriverError: it did not become true in `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > end:
                raise DriverError(f"waited {timeout:.0f} s for {what}")
            time.sleep(period)

    # --- hurting

    def kill_rank(self, namespace: str, pod: str, rank: int, signal: int = 9) -> float:
        """End one trainer process from inside its pod; return the moment (Unix seconds)."""
        arguments = (
            "exec",
            pod,
            "-n",
            namespace,
            "-c",
            "trainer",
            "--",
            "python3",
            "-c",
            KILL_RANK,
            str(rank),
            str(signal),
        )
        return float(self.kubectl(*arguments))

    def kill_agent(self, namespace: str, pod: str) -> float:
        """Kill -9 PID 1 of a worker from its node; return the moment."""
        pid = int(run(str(CLUSTER_COMMAND), "pod-pid", "--name", self.cluster, namespace, pod, "trainer").strip())
        now = time.time()
        run("kill", "-9", str(pid))
        return now

    def delete_pod(self, namespace: str, pod: str, force: bool = True) -> float:
        """Delete a pod and return the moment the request was sent."""
        flags = ["--force", "--grace-period=0"] if force else []
        now = time.time()
        self.kubectl("delete", "pod", pod, "-n", namespace, "--wait=false", *flags)
        return now

    def delete_operator(self) -> float:
        """Delete the operator's pods at once and return the moment."""
        now = time.time()
        flags = ("--wait=false", "--force", "--grace-period=0")
        self.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, "-l", OPERATOR_SELECTOR, *flags)
        return now


def read_steps(store: Path) -> list[StepLine]:
    """Return the lines of a store's metrics.jsonl so far; a line that is still being written is left out."""
    try:
        text = (store / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    complete = text[: text.rfind("\n") + 1].splitlines()
    rows = [json.loads(line) for line in complete if line.strip()]
    return [StepLine(row["attempt"], row["step"], row["loss"], row["time"]) for row in rows if "step" in row]


def namespace_object(name: str) -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def shared_volume(namespace: str, claim: str, path: str) -> list[dict[str, Any]]:
    """A static volume on a folder that every node sees, and the claim bound to it."""
    volume = f"llmtrain-{namespace}-{claim}"
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "resources": {"requests": {"storage": "10Gi"}}}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": {"storage": "10Gi"},
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {
                    "namespace": namespace,
                    "name": claim,
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                },
                "hostPath": {"path": path, "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {**common, "volumeName": volume},
        },
    ]
