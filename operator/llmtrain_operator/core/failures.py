"""Cause to class: what broke the running attempt, and which of several reports is the cause and which are symptoms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llmtrain_api.constants import ExitCode, FailureClass
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.sync import RankReport
from llmtrain_operator.core.gang import Gang, Slot, is_finished
from llmtrain_operator.core.observed import Observed, Worker
from llmtrain_operator.core.text import seconds, signal_name

CLASS_ORDER = {failure_class: rank for rank, failure_class in enumerate(FailureClass)}
BY_EXIT_CODE: dict[int, FailureClass] = {
    ExitCode.USER_ERROR: FailureClass.USER_ERROR,
    ExitCode.NUMERICS: FailureClass.NUMERICS,
    ExitCode.CHECKPOINT: FailureClass.CHECKPOINT,
    ExitCode.STALE_ATTEMPT: FailureClass.CHECKPOINT,
    ExitCode.PEER_LOST: FailureClass.COMMUNICATION,
    ExitCode.PREEMPTED: FailureClass.DISRUPTION,
}
SIGTERM = 15
NODE_GONE_REASONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC", "NodeLost"})
"""Of the condition DisruptionTarget, or of a failed pod: its node went away."""
HARDWARE_SUSPECTS = frozenset({FailureClass.CRASH, FailureClass.COMMUNICATION, FailureClass.HANG})
"""What a broken device looks like from inside."""
VAGUE_CLASSES = frozenset({FailureClass.CRASH, FailureClass.COMMUNICATION, FailureClass.DISRUPTION})
"""Of ranks: what a rank may also show because somebody else went away."""
SYMPTOM_CLASSES = frozenset({FailureClass.COMMUNICATION, FailureClass.DISRUPTION})
"""Of ranks: what is believed only when no cause was reported for a moment."""
NAMED_RANKS = 8
OLDEST_BELIEVED_SECONDS = 600.0
NEWEST_BELIEVED_SECONDS = 5.0
"""Exit times come from the nodes' clocks: one further back, or further ahead, than this is not believed."""


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong, as it will be recorded if it is the cause."""

    failure_class: FailureClass
    message: str
    at: float
    """Unix seconds."""
    timed: bool = True
    """False: `at` is the time of reading, for want of a better one."""
    worker: Worker | None = None
    index: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    """Of the rank or the container; 128 + N where signal N ended it."""
    of_rank: bool = False
    """A rank exited; else the worker itself is unfit, or a deadline passed."""
    replace: bool = False
    """The worker cannot be used again."""
    graceful: bool = False
    """Its ranks were told to stop and may be writing a checkpoint, for which they need their peers."""
    fatal: bool = False
    """No restart can help."""


def succeeded(gang: Gang, status: LLMTrainJobStatus, ranks_per_worker: int) -> bool:
    """Tell whether every rank of the attempt has reported exit code 0."""
    return all(slot.holder and _all_zero(slot.holder, status.attempt, ranks_per_worker) for slot in gang.slots)


def running_failures(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> list[Failure]:
    """Return everything that is wrong with an attempt that was started, causes and symptoms alike."""
    ranks_per_worker = observed.job.spec.ranks_per_worker()
    found = []
    for slot in gang.slots:
        done = slot.holder and _all_zero(slot.holder, status.attempt, ranks_per_worker)
        if slot.wanted is None and not done:
            found.append(_broken_slot(observed, slot, gang))
    found += [_broken_device(observed, worker) for worker in gang.wanted() if worker.broken_device]
    for worker in gang.holders():
        found.extend(_rank_failures(observed, status, worker))
    return found


def gathering_failures(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> list[Failure]:
    """Return what is wrong with workers made for the attempt that is still gathering.

    An older worker that ends now is simply replaced: its new name is free and the attempt has not begun.
    """
    broken = [s for s in gang.slots if s.wanted is None and s.newest and s.newest.created_attempt == status.attempt]
    return [_broken_slot(observed, slot, gang, started=False) for slot in broken]


def primary(failures: Sequence[Failure]) -> Failure | None:
    """Return the cause: the best class first, then the earliest. What ranks show because a worker left counts last."""
    worker_failed = any(not failure.of_rank for failure in failures)

    def order(failure: Failure) -> tuple[bool, int, float, int, int]:
        symptom = worker_failed and failure.of_rank and failure.failure_class in VAGUE_CLASSES
        index, rank = (-1 if n is None else n for n in (failure.index, failure.rank))
        return (symptom, CLASS_ORDER[failure.failure_class], failure.at, index, rank)

    return min(failures, key=order, default=None)


def unsettled_until(observed: Observed, status: LLMTrainJobStatus, gang: Gang, cause: Failure) -> float | None:
    """Return until when a mere symptom waits for its cause to be reported; None where it need not (any more)."""
    if not cause.of_rank or not cause.timed or cause.failure_class not in SYMPTOM_CLASSES:
        return None
    until = cause.at + observed.policy.settle_seconds
    return until if until > observed.now and _not_ended(observed, status, gang) else None


def settled(observed: Observed, status: LLMTrainJobStatus, gang: Gang, cause: Failure) -> Failure:
    """Return a symptom without a known cause with the ranks that are still to end: one of them is the suspect."""
    missing = _not_ended(observed, status, gang)
    if not missing or not cause.of_rank or cause.failure_class not in SYMPTOM_CLASSES:
        return cause
    names = ", ".join(map(str, missing[:NAMED_RANKS])) + (", ..." if len(missing) > NAMED_RANKS else "")
    told = "rank" if len(missing) == 1 else "ranks"
    return replace(cause, message=f"{cause.message}; not ended: {told} {names}")


def _not_ended(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> list[int]:
    """Return the global ranks whose exit in this attempt is still to be reported."""
    reports = [rank for worker in gang.wanted() for rank in attempt_ranks(worker, status.attempt)]
    ended = {rank.global_rank for rank in reports if rank.state == "exited"}
    return [rank for rank in range(observed.job.spec.world_size()) if rank not in ended]


def attempt_ranks(worker: Worker, attempt: int) -> Sequence[RankReport]:
    """Return the worker's ranks of this very attempt; reports of older ones are history."""
    return worker.agent.ranks if worker.agent and worker.agent.attempt == attempt else ()


def _all_zero(worker: Worker, attempt: int, ranks_per_worker: int) -> bool:
    ranks = attempt_ranks(worker, attempt)
    return len(ranks) >= ranks_per_worker and all(rank.state == "exited" and rank.exit_code == 0 for rank in ranks)


def _rank_failures(observed: Observed, status: LLMTrainJobStatus, worker: Worker) -> Iterable[Failure]:
    for rank in attempt_ranks(worker, status.attempt):
        if rank.state != "exited" or rank.exit_code == ExitCode.SUCCESS:
            continue
        failure_class = _on_this_node(classify_rank(rank), worker)
        exited_at = _believed(rank.exited_at, observed.now)
        yield Failure(
            failure_class=failure_class,
            message=_rank_message(rank, worker, failure_class) + _device(failure_class, worker),
            at=observed.now if exited_at is None else exited_at,
            timed=exited_at is not None,
            worker=worker,
            index=worker.index,
            rank=rank.global_rank,
            exit_code=rank.exit_code if rank.signal is None else 128 + rank.signal,
            of_rank=True,
            replace=is_finished(worker) or failure_class is FailureClass.HARDWARE,
            fatal=failure_class is FailureClass.USER_ERROR,
        )


def classify_rank(rank: RankReport) -> FailureClass:
    """Return the class of an exit that was no success."""
    if rank.by_agent:
        return FailureClass.DISRUPTION
    if rank.oom_killed:
        return FailureClass.OUT_OF_MEMORY
    if rank.signal == SIGTERM:
        return FailureClass.DISRUPTION
    return FailureClass.CRASH if rank.exit_code is None else BY_EXIT_CODE.get(rank.exit_code, FailureClass.CRASH)


def _on_this_node(failure_class: FailureClass, worker: Worker) -> FailureClass:
    """What a device looks like from inside when its node says that it is broken."""
    broken = worker.hardware or worker.broken_device
    return FailureClass.HARDWARE if broken and failure_class in HARDWARE_SUSPECTS else failure_class


def _device(failure_class: FailureClass, worker: Worker) -> str:
    return (
        f"; node {worker.node}: {worker.hardware or worker.broken_device}"
        if failure_class is FailureClass.HARDWARE
        else ""
    )


def _rank_message(rank: RankReport, worker: Worker, failure_class: FailureClass) -> str:
    if failure_class is FailureClass.USER_ERROR and rank.error:
        return rank.error.message
    if rank.signal is not None:
        ending = f"was killed by {signal_name(rank.signal)}"
    else:
        ending = f"exited with code {rank.exit_code}"
    if rank.oom_killed:
        ending += ": out of memory"
    if rank.by_agent:
        ending += " after its agent had stopped it"
    said = f": {rank.error.message}" if rank.error else ""
    return f"rank {rank.global_rank} on worker {worker.index} {ending}{said}"


def _broken_slot(observed: Observed, slot: Slot, gang: Gang, started: bool = True) -> Failure:
    worker = slot.newest
    if worker is None:
        message = f"worker {slot.index} is gone"
        return Failure(FailureClass.DISRUPTION, message, observed.now, index=slot.index, replace=True)
    failure_class, message = _worker_cause(observed, worker, gang, started)
    silence = observed.now - worker.agent.last_seen if worker.agent else 0.0
    graceful = started and not is_finished(worker) and worker.name not in gang.lost
    return Failure(
        failure_class=failure_class,
        message=f"worker {worker.index} {message}",
        at=observed.now,
        worker=worker,
        index=worker.index,
        exit_code=worker.exit_code,
        replace=True,
        graceful=graceful and silence <= observed.policy.agent_lost_seconds and _ranks_may_run(worker),
    )


def _worker_cause(observed: Observed, worker: Worker, gang: Gang, started: bool) -> tuple[FailureClass, str]:
    crash = FailureClass.CRASH if started else FailureClass.STARTUP
    if worker.oom_killed:
        return FailureClass.OUT_OF_MEMORY, "was killed: out of memory"
    if worker.disruption:
        gone = worker.disruption in NODE_GONE_REASONS
        return (FailureClass.NODE_LOST if gone else FailureClass.DISRUPTION), f"was disrupted: {worker.disruption}"
    if worker.phase == "Failed" and not worker.deleting:
        code = "without an exit code" if worker.exit_code is None else f"with exit code {worker.exit_code}"
        said = f": {worker.waiting_message}" if worker.waiting_message else ""
        return crash, f"failed {code}{said}"
    if worker.phase == "Succeeded" and not worker.deleting:
        return (FailureClass.DISRUPTION if started else crash), "left before the job was done"
    if worker.name in gang.lost:
        heard = worker.agent.last_seen if worker.agent else observed.observing_since or observed.now
        why = worker.node_lost or "while others report"
        where = f" on node {worker.node}" if worker.node else ""
        return FailureClass.NODE_LOST, f"has been silent for {seconds(observed.now - heard)}{where}: {why}"
    return FailureClass.DISRUPTION, "is being deleted" if worker.deleting else "was told to stop"


def _broken_device(observed: Observed, worker: Worker) -> Failure:
    """Its ranks may still write a checkpoint; they will not make many steps more."""
    return Failure(
        FailureClass.HARDWARE,
        f"worker {worker.index} on node {worker.node}: {worker.broken_device}",
        observed.now,
        worker=worker,
        index=worker.index,
        replace=True,
        graceful=_ranks_may_run(worker),
    )


def _ranks_may_run(worker: Worker) -> bool:
    return worker.agent is None or any(rank.state == "running" for rank in worker.agent.ranks)


def _believed(at: float | None, now: float) -> float | None:
    if at is None or not now - OLDEST_BELIEVED_SECONDS <= at <= now + NEWEST_BELIEVED_SECONDS:
        return None
    return at
