"""Who is in the gang: for each worker index the one worker that does, or shall do, its work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmtrain_api.constants import Action
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core.actions import CreateWorker, DeleteWorker
from llmtrain_operator.core.avoid import avoided_nodes, waits_in_vain
from llmtrain_operator.core.names import worker_name
from llmtrain_operator.core.observed import Observed, Worker

FINISHED_PHASES = frozenset({"Succeeded", "Failed"})
CLOCK_SLACK_SECONDS = 5.0
"""Creation times come from the API server in whole seconds, reports are stamped by the operator."""


@dataclass(frozen=True)
class Slot:
    """One index of the gang."""

    index: int
    wanted: Worker | None
    """The live worker of this index; None where it must be made."""
    newest: Worker | None
    """The newest worker of this index, alive or not; None where there is none."""

    @property
    def holder(self) -> Worker | None:
        """The worker whose ranks count for this index."""
        return self.wanted or self.newest


@dataclass(frozen=True)
class Gang:
    slots: tuple[Slot, ...]
    leftovers: tuple[Worker, ...]
    """Workers that are not wanted (any more), finished ones among them."""
    lost: frozenset[str]
    """Names of running workers that fell silent while others report, or whose node is gone."""
    condemned: frozenset[str]
    """Names of workers that a failure was answered by replacing."""

    def wanted(self) -> list[Worker]:
        """The live workers, by index."""
        return [slot.wanted for slot in self.slots if slot.wanted]

    def holders(self) -> list[Worker]:
        """The workers whose ranks count, by index."""
        return [slot.holder for slot in self.slots if slot.holder]


def tidy(observed: Observed) -> Observed:
    """Return the snapshot with workers in one order, without views of agents older than their worker."""
    workers = [replace(w, agent=None) if _predates(w) else w for w in observed.workers]
    return replace(observed, workers=tuple(sorted(workers, key=_age)))


def assemble(observed: Observed, status: LLMTrainJobStatus) -> Gang:
    """Choose for each index the newest live worker that was made for a gang of this size."""
    replicas = observed.job.spec.workers.replicas
    fitting = [w for w in observed.workers if w.replicas == replicas and w.created_attempt <= status.attempt]
    lost = _lost(observed, status, fitting)
    condemned = frozenset(w.name for w in observed.workers if _is_condemned(w, status))
    avoided = avoided_nodes(observed, status)
    newest = {w.index: w for w in fitting}
    unfit = lost | condemned | {w.name for w in fitting if waits_in_vain(w, avoided)}
    live = {w.index: w for w in fitting if is_live(w) and w.name not in unfit}
    slots = tuple(Slot(i, live.get(i), newest.get(i)) for i in range(replicas))
    chosen = {slot.wanted.name for slot in slots if slot.wanted}
    leftovers = tuple(w for w in observed.workers if w.name not in chosen)
    return Gang(slots, leftovers, lost, condemned)


def is_finished(worker: Worker) -> bool:
    """Tell whether the worker has ended."""
    return worker.phase in FINISHED_PHASES


def is_leaving(worker: Worker) -> bool:
    """Tell whether the worker was told to end: it may still be writing a checkpoint."""
    return not is_finished(worker) and (worker.deleting or (worker.agent is not None and worker.agent.stopping))


def is_live(worker: Worker) -> bool:
    """Tell whether the worker can be given work, now or once it has started."""
    return not is_finished(worker) and not is_leaving(worker) and not worker.deleting


def is_connected(worker: Worker, observed: Observed) -> bool:
    """Tell whether the worker's agent will get an order that is published now."""
    agent = worker.agent
    return (
        agent is not None and is_live(worker) and observed.now - agent.last_seen <= observed.policy.agent_lost_seconds
    )


def may_run_ranks_before(attempt: int, worker: Worker) -> bool:
    """Tell whether ranks of an older attempt may still run in this worker."""
    if is_finished(worker):
        return False
    if worker.agent is None:
        return worker.phase == "Running" and worker.created_attempt < attempt
    return worker.agent.attempt < attempt and any(rank.state == "running" for rank in worker.agent.ranks)


def next_attempt(observed: Observed, status: LLMTrainJobStatus) -> int:
    """Return a number above everything that was ever used, also where somebody has wiped the status."""
    used = [w.created_attempt for w in observed.workers]
    used += [w.agent.attempt for w in observed.workers if w.agent]
    return max([status.attempt, *used]) + 1


def missing_workers(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> tuple[CreateWorker, ...]:
    """Return the workers to create. Only before the attempt has started: nobody joins a running one."""
    if status.started_attempt >= status.attempt:
        return ()
    taken = {w.name for w in observed.workers}
    job, attempt = observed.job.metadata.name, status.attempt
    avoid = avoided_nodes(observed, status)
    missing = [slot.index for slot in gang.slots if not slot.wanted]
    wanted = [CreateWorker(worker_name(job, index, attempt), index, attempt, avoid) for index in missing]
    return tuple(create for create in wanted if create.name not in taken)


def surplus_workers(gang: Gang, draining: bool) -> tuple[DeleteWorker, ...]:
    """Return the leftovers to delete. Of finished ones the newest per index stays, for its logs.

    While ranks are given time for a checkpoint, a worker that is to be replaced writes its part of it too.
    """
    keep = {w.index: w.name for w in gang.leftovers if is_finished(w)}
    deletes = []
    for worker in gang.leftovers:
        if worker.deleting or worker.name == keep.get(worker.index):
            continue
        at_once = (
            is_finished(worker)
            or worker.name in gang.lost
            or (worker.name in gang.condemned and not is_leaving(worker) and not draining)
        )
        deletes.append(DeleteWorker(worker.name, worker.uid, 0.0 if at_once else None))
    return tuple(deletes)


def _age(worker: Worker) -> tuple[int, int, float, str, str]:
    return (worker.index, worker.created_attempt, worker.created_at, worker.name, worker.uid)


def _predates(worker: Worker) -> bool:
    """A worker that vanished before it started may be made again by the same name; the old agent's view is stale."""
    return worker.agent is not None and worker.agent.last_seen < worker.created_at - CLOCK_SLACK_SECONDS


def _lost(observed: Observed, status: LLMTrainJobStatus, workers: Iterable[Worker]) -> frozenset[str]:
    limit = observed.policy.agent_lost_seconds
    judged = {w.name: _silence(w, observed, status) for w in workers if is_live(w)}
    # Where nobody reports, it is the operator that is cut off, not its workers.
    heard = [w.agent.last_seen for w in workers if w.agent and is_live(w)] + [observed.heard_at or 0.0]
    somebody_reports = observed.now - max(heard) <= limit / 2
    silent = {name for name, silence in judged.items() if somebody_reports and silence > limit}
    return frozenset(silent | {w.name for w in workers if is_live(w) and _left_with_its_node(w, observed)})


def _left_with_its_node(worker: Worker, observed: Observed) -> bool:
    """A node may be gone for the API server alone; a worker that still reports is left in peace."""
    if not worker.node_lost:
        return False
    if worker.agent is None:  # a watch may tell of a new pod before it tells of its new node
        return observed.now - worker.created_at > observed.policy.agent_lost_seconds
    return _heard_ago(worker, observed) > observed.policy.node_lost_silence_seconds


def _is_condemned(worker: Worker, status: LLMTrainJobStatus) -> bool:
    replaced = (Action.REPLACE_WORKER, Action.REPLACE_NODE)
    return any(
        (f.pod == worker.name and f.action in replaced)
        or (f.action is Action.REQUEUE and worker.created_attempt <= f.attempt)
        for f in status.failures
    )


def _heard_ago(worker: Worker, observed: Observed) -> float:
    """Seconds since the agent was heard, or since it could be."""
    assert worker.agent
    return observed.now - max(worker.agent.last_seen, observed.observing_since or 0.0)


def _silence(worker: Worker, observed: Observed, status: LLMTrainJobStatus) -> float:
    """Seconds since the agent was heard; 0 for one that is not yet expected to report."""
    if worker.agent:
        return _heard_ago(worker, observed)
    once_reported = worker.created_attempt <= status.started_attempt
    if observed.observing_since is None or not once_reported:
        return 0.0
    return observed.now - max(observed.observing_since, worker.created_at)
