"""Things that go wrong in the simulated cluster, by name."""

from __future__ import annotations

from collections.abc import Callable

from llmtrain_operator.core.actions import DeleteWorker
from tests.support.cluster_sim import ClusterSim
from tests.support.sim_worker import SimPod


def _end_rank(
    sim: ClusterSim, target: int, code: int | None = None, signal: int | None = None, oom: bool = False
) -> None:
    ranks = [rank for pod in _running(sim) for rank in pod.agent.ranks if rank.running]
    if ranks:
        rank = ranks[target % len(ranks)]
        rank.oom = oom
        rank.end(sim.now, exit_code=code, signal=signal)


def _hang_rank(sim: ClusterSim, target: int) -> None:
    ranks = [rank for pod in _running(sim) for rank in pod.agent.ranks if rank.running]
    if ranks:
        ranks[target % len(ranks)].hung = True


def _on_pod(act: Callable[[ClusterSim, SimPod], None]) -> Callable[[ClusterSim, int], None]:
    def fault(sim: ClusterSim, target: int) -> None:
        pods = [pod for pod in sim.pods.values() if not pod.finished]
        if pods:
            act(sim, pods[target % len(pods)])
            sim.dirty = True

    return fault


def _running(sim: ClusterSim) -> list[SimPod]:
    return [pod for pod in sim.pods.values() if pod.phase == "Running"]


def _delete(sim: ClusterSim, pod: SimPod, grace: float | None) -> None:
    sim.delete_pod(DeleteWorker(pod.name, pod.uid, grace))


def _evict(sim: ClusterSim, pod: SimPod) -> None:
    pod.disruption = "EvictionByEvictionAPI"
    pod.die(sim.now, 137)


def _cut(sim: ClusterSim, pod: SimPod) -> None:
    pod.cut_until = sim.now + 400.0


def _blip(sim: ClusterSim, pod: SimPod) -> None:
    pod.cut_until = sim.now + 10.0


def _api_away(sim: ClusterSim, target: int) -> None:
    sim.api_down_until = sim.now + 5.0 + target


def _sigterm_everyone(sim: ClusterSim, target: int) -> None:
    for pod in _running(sim):
        for rank in pod.agent.ranks:
            rank.end(sim.now, exit_code=143)


def _suspend(sim: ClusterSim, target: int) -> None:
    sim.edit(suspend=True)
    sim.later(target * 3.0, lambda: sim.edit(suspend=False))


def _resize(sim: ClusterSim, target: int) -> None:
    sim.edit(workers={"replicas": target % 3 + 1})


def _die_between_effects(sim: ClusterSim, target: int) -> None:
    sim.die_after = target % 6


FAULTS: dict[str, Callable[[ClusterSim, int], None]] = {
    "rank killed": lambda sim, target: _end_rank(sim, target, signal=9),
    "rank crashed": lambda sim, target: _end_rank(sim, target, code=1),
    "rank not finite": lambda sim, target: _end_rank(sim, target, code=76),
    "rank cannot checkpoint": lambda sim, target: _end_rank(sim, target, code=77),
    "rank lost a peer": lambda sim, target: _end_rank(sim, target, code=75),
    "rank out of memory": lambda sim, target: _end_rank(sim, target, signal=9, oom=True),
    "rank stopped": _hang_rank,
    "ranks told to stop": _sigterm_everyone,
    "pod deleted": _on_pod(lambda sim, pod: _delete(sim, pod, None)),
    "pod force-deleted": _on_pod(lambda sim, pod: _delete(sim, pod, 0.0)),
    "pod evicted": _on_pod(_evict),
    "agent killed": _on_pod(lambda sim, pod: pod.die(sim.now, 137)),
    "pod out of memory": _on_pod(lambda sim, pod: pod.die(sim.now, 137, oom=True)),
    "node cut off": _on_pod(_cut),
    "network blip": _on_pod(_blip),
    "operator killed": lambda sim, target: sim.crash_operator(target),
    "operator killed between effects": _die_between_effects,
    "API server away": _api_away,
    "job suspended": _suspend,
    "job resized": _resize,
}
