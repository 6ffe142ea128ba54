"""The fault matrix: what is done to a job, and what the operator is to make of it. One table; the e2e suite runs it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain_api.constants import VOLUME_ROOT
from llmtrain_kind.driver import Driver, read_steps
from tests.e2e.jobs import CLAIM

CLAIM_FOLDER = f"{VOLUME_ROOT}/{CLAIM}/injector"
"""Where the trainer's container sees the injector."""
INJECTOR = Path(__file__).with_name("injector") / "sitecustomize.py"


@dataclass
class Bed:
    """A job that is hurt, and what the test knows of it."""

    driver: Driver
    namespace: str
    name: str
    folder: Path
    """Of the namespace, on the storage that all nodes share."""
    mended: list[Callable[[], object]] = field(default_factory=list)
    """What undoes the newest fault, as soon as the job has recovered from it."""

    @property
    def store(self) -> Path:
        """Where the job's checkpoints and metrics lie."""
        return self.folder / self.name

    def pod(self, index: int) -> str:
        """Name of the worker's pod."""
        return self.driver.workers(self.namespace, self.name)[index]

    def node(self, index: int) -> str:
        """Name of the node where the worker runs."""
        words = ("get", "pod", self.pod(index), "-n", self.namespace, "-o", "jsonpath={.spec.nodeName}")
        return self.driver.kubectl(*words).strip()

    def order(self, rank: int, words: str) -> float:
        """Let the injector in a rank do something; return the moment it was told."""
        folder = injector_folder(self.folder)
        draft = folder / f"draft-{rank}"
        draft.write_text(words)
        draft.chmod(0o666)
        draft.rename(folder / f"rank-{rank}")
        return time.time()


def injector_folder(folder: Path) -> Path:
    """Return where the injector lies on the shared storage, with it in it."""
    target = folder / "injector"
    if not target.exists():
        target.mkdir()
        target.chmod(0o777)
        (target / INJECTOR.name).write_bytes(INJECTOR.read_bytes())
    return target


def signalled(rank: int, number: signal.Signals) -> Callable[[Bed], float]:
    """Return a fault that sends a signal to a rank; two ranks live on each worker."""
    return lambda bed: bed.driver.kill_rank(bed.namespace, bed.pod(rank // 2), rank, number)


def told(rank: int, words: str) -> Callable[[Bed], float]:
    """Return a fault that a rank does to itself."""
    return lambda bed: bed.order(rank, words)


def pod_deleted(index: int, force: bool) -> Callable[[Bed], float]:
    return lambda bed: bed.driver.delete_pod(bed.namespace, bed.pod(index), force=force)


def agent_killed(index: int) -> Callable[[Bed], float]:
    return lambda bed: bed.driver.kill_agent(bed.namespace, bed.pod(index))


def evicted(index: int) -> Callable[[Bed], float]:
    """Return a fault that uses the eviction API, as `kubectl drain` does."""

    def deal(bed: Bed) -> float:
        pod = bed.pod(index)
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": bed.namespace},
        }
        path = f"/api/v1/namespaces/{bed.namespace}/pods/{pod}/eviction"
        now = time.time()
        bed.driver.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
        return now

    return deal


def stuck_terminating(index: int) -> Callable[[Bed], float]:
    """Return a fault that deletes a pod which somebody's finalizer keeps from going."""

    def deal(bed: Bed) -> float:
        pod = bed.pod(index)
        target = ("pod", pod, "-n", bed.namespace, "--type=merge", "-p")
        bed.driver.kubectl("patch", *target, '{"metadata":{"finalizers":["example.com/stuck"]}}')
        bed.mended.append(lambda: bed.driver.kubectl("patch", *target, '{"metadata":{"finalizers":null}}'))
        return bed.driver.delete_pod(bed.namespace, pod)

    return deal


def checkpoint_corrupt(rank: int) -> Callable[[Bed], float]:
    """Return a fault that flips one byte in every shard of the newest checkpoint and kills a rank.

    The rank is stopped before, so that no newer checkpoint can be committed meanwhile.
    """

    def deal(bed: Bed) -> float:
        pod = bed.pod(rank // 2)
        bed.driver.kill_rank(bed.namespace, pod, rank, signal.SIGSTOP)
        bed.driver.wait("training to stand still", lambda: _stands_still(bed), 30, 0.0)
        newest = max(path.parent for path in bed.store.glob("step-*/manifest.json"))
        for shard in newest.glob("*.distcp"):
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 0x01
            shard.write_bytes(data)
        return bed.driver.kill_rank(bed.namespace, pod, rank)

    return deal


def _stands_still(bed: Bed) -> bool:
    before = sorted(path.name for path in bed.store.iterdir()), read_steps(bed.store)[-1]
    time.sleep(1.0)
    return before == (sorted(path.name for path in bed.store.iterdir()), read_steps(bed.store)[-1])


def node_fault(index: int, verb: str, mend: str) -> Callable[[Bed], float]:
    """Return a fault of the node where a worker runs."""

    def deal(bed: Bed) -> float:
        node = bed.node(index)
        bed.mended.append(lambda: bed.driver.fault("node", node, mend))
        now = time.time()
        bed.driver.fault("node", node, verb)
        return now

    return deal


@dataclass(frozen=True)
class Fault:
    """One row."""

    id: str
    deal: Callable[[Bed], float]
    """Hurts the job; returns the moment, in Unix seconds."""
    failure_class: str
    action: str
    worker: int | None
    """The culprit; None where nobody is blamed."""
    message: str
    """Words that the failure's message holds."""
    skips: str = ""
    """Words by which the restart says why it passed over a checkpoint."""


LADDER: tuple[Fault, ...] = (
    Fault("rank exits with code 1", told(3, "exit 1"), "Crash", "RestartRanks", 1, "exited with code 1"),
    Fault("rank exits with code 137", told(2, "exit 137"), "Crash", "RestartRanks", 1, "exited with code 137"),
    Fault("rank 0 killed (SIGKILL)", signalled(0, signal.SIGKILL), "Crash", "RestartRanks", 0, "SIGKILL"),
    Fault("another rank killed (SIGKILL)", signalled(3, signal.SIGKILL), "Crash", "RestartRanks", 1, "SIGKILL"),
    Fault("rank crashes (SIGSEGV, 139)", signalled(1, signal.SIGSEGV), "Crash", "RestartRanks", 0, "SIGSEGV"),
    Fault("rank hangs (SIGSTOP)", signalled(2, signal.SIGSTOP), "Hang", "RestartRanks", 1, "rank 2"),
    Fault("newest checkpoint corrupt", checkpoint_corrupt(3), "Crash", "RestartRanks", 1, "SIGKILL", "checksum"),
    Fault("agent killed (SIGKILL)", agent_killed(1), "Crash", "ReplaceWorker", 1, "exit code 137"),
    Fault("pod deleted", pod_deleted(1, False), "Disruption", "ReplaceWorker", 1, "worker 1"),
    Fault("pod force-deleted", pod_deleted(0, True), "Disruption", "ReplaceWorker", 0, "worker 0"),
    Fault("pod evicted by the API", evicted(1), "Disruption", "ReplaceWorker", 1, "worker 1"),
    Fault("pod stuck in Terminating", stuck_terminating(1), "Disruption", "ReplaceWorker", 1, "worker 1"),
    # The last one: whatever ends a pod later, its runtime calls OOMKilled.
    Fault("rank out of memory", told(3, "fill-memory"), "OutOfMemory", "RestartRanks", 1, "out of memory"),
)
"""One job goes through all of these, one after the other."""
NODES: tuple[Fault, ...] = (
    Fault("node killed", node_fault(1, "kill", "start"), "NodeLost", "ReplaceNode", 1, "silent"),
    Fault("node cut off, healed later", node_fault(1, "cut", "heal"), "NodeLost", "ReplaceNode", 1, "silent"),
)
"""Each of these gets a job of its own: a node that failed is avoided for an hour, and the cluster has three."""
