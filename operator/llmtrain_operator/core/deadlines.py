"""Every waiting phase ends: pulling, pending, starting, finishing, and the job as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain_api.constants import ConditionType, FailureClass
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core.budgets import backoff_seconds
from llmtrain_operator.core.failures import Failure, attempt_ranks
from llmtrain_operator.core.gang import Gang, is_connected
from llmtrain_operator.core.observed import Observed, Worker
from llmtrain_operator.core.times import from_timestamp

PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff"})
"""Waiting reasons that may pass by themselves: a registry that is away for a moment."""
BROKEN_REASONS = frozenset(
    {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"}
)
"""Waiting reasons that do not pass by themselves."""
BROKEN_SECONDS = 10.0
"""So long the latter are still given, because a Secret or a volume may arrive a moment after the pod."""


@dataclass(frozen=True)
class Verdict:
    """What the deadlines say now."""

    failures: tuple[Failure, ...] = ()
    due: tuple[float, ...] = ()
    """Unix seconds at which a deadline will pass, or a wait will be over."""


def started_at(status: LLMTrainJobStatus) -> float:
    """Return when the attempt's ranks were told to start: the gang was completed, or restarted in place later on."""
    ready = status.condition(ConditionType.WORKERS_READY)
    completed = from_timestamp(ready.last_transition_time) if ready and ready.status == "True" else None
    return max(completed or 0.0, from_timestamp(status.attempt_started_at) or 0.0)


def active_until(observed: Observed, status: LLMTrainJobStatus) -> float | None:
    """Return when spec.activeDeadlineSeconds ends the job; None where it has no such deadline."""
    limit, begin = observed.job.spec.active_deadline_seconds, from_timestamp(status.start_time)
    return None if limit is None or begin is None else begin + limit


def backoff_until(observed: Observed, status: LLMTrainJobStatus) -> float:
    """Return before when the attempt must not start."""
    return (from_timestamp(status.attempt_started_at) or 0.0) + backoff_seconds(status.restarts, observed.policy)


def gathering(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> Verdict:
    """Judge workers that have not reported yet, and those that the API server does not let us create."""
    failures, due = [], []
    limit = observed.job.spec.failure_policy.deadlines.pending_seconds
    create_until = (from_timestamp(status.attempt_started_at) or observed.now) + limit
    for slot in gang.slots:
        if slot.wanted is None and create_until > observed.now:
            due.append(create_until)
        elif slot.wanted is None:
            failures.append(_never_created(observed, slot.index, limit))
    for worker in gang.wanted():
        if is_connected(worker, observed):
            continue
        for until, failure in _pending_deadlines(observed, status, worker):
            if until > observed.now:
                due.append(until)
            else:
                failures.append(failure)
    return Verdict(tuple(failures), tuple(due))


def running(observed: Observed, status: LLMTrainJobStatus, gang: Gang, stepped: bool) -> Verdict:
    """Judge an attempt that was started: its first step, its end, and agents that fall silent."""
    limit = observed.job.spec.failure_policy.deadlines.start_seconds
    due = tuple(at for worker in gang.wanted() if (at := _judge_silence_at(observed, worker)) is not None)
    until, message = None, ""
    ranks = [rank for worker in gang.holders() for rank in attempt_ranks(worker, status.attempt)]
    ended = [rank.exited_at for rank in ranks if rank.state == "exited" and rank.exited_at is not None]
    begun = started_at(status)
    if ended:
        # The nodes' clocks may be wrong, but nothing ended before it was started.
        until = max(min(ended), begun) + limit
        message = f"{len(ended)} of {observed.job.spec.world_size()} ranks ended, the others went on for {limit} s"
    elif not stepped and gang.slots[0].wanted and gang.slots[0].wanted.agent:
        # Worker 0 reports steps. Where its agent has not come back to a restarted operator, nothing is known.
        until = max(begun, observed.observing_since or 0.0) + limit
        message = f"no optimizer step within {limit} s of the start (spec.failurePolicy.deadlines.startSeconds)"
    if until is None:
        return Verdict(due=due)
    if until > observed.now:
        return Verdict(due=(*due, min(until, observed.now + limit)))
    return Verdict((Failure(FailureClass.STARTUP, message, observed.now),), due)


def _judge_silence_at(observed: Observed, worker: Worker) -> float | None:
    """Return when to see whether the worker has fallen silent; None where that is never judged."""
    policy, since = observed.policy, observed.observing_since
    if worker.agent is None and since is None:
        return None
    heard_at = max(worker.agent.last_seen if worker.agent else worker.created_at, since or 0.0)
    gone = worker.node_lost and worker.agent
    until = heard_at + (policy.node_lost_silence_seconds if gone else policy.agent_lost_seconds) + 0.001
    # Silent and yet not lost: nobody reports at all. That other jobs are heard again is no sign that reaches this one.
    return until if until > observed.now else observed.now + policy.agent_lost_seconds


def _pending_deadlines(observed: Observed, status: LLMTrainJobStatus, worker: Worker) -> list[tuple[float, Failure]]:
    deadlines = observed.job.spec.failure_policy.deadlines
    gathering_since = max(worker.created_at, from_timestamp(status.attempt_started_at) or 0.0)
    if worker.phase == "Running":
        gathering_since = max(gathering_since, observed.observing_since or 0.0)
    pending = _startup(observed, status, worker, f"has not reported within {deadlines.pending_seconds} s")
    found = [(gathering_since + deadlines.pending_seconds, pending)]
    troubled_since = worker.waiting_since or worker.created_at
    if worker.waiting_reason in PULL_REASONS:
        failure = _startup(
            observed, status, worker, f"cannot pull its image for {deadlines.image_pull_seconds} s", True
        )
        found.append((troubled_since + deadlines.image_pull_seconds, failure))
    if worker.waiting_reason in BROKEN_REASONS:
        found.append((troubled_since + BROKEN_SECONDS, _startup(observed, status, worker, "cannot be started", True)))
    return found


def _never_created(observed: Observed, index: int, limit: int) -> Failure:
    message = (
        f"worker {index} could not be created within {limit} s (spec.failurePolicy.deadlines.pendingSeconds): a quota, "
        "an admission policy or spec.workers.template stands in the way; the job's events WriteFailed quote the refusal"
    )
    return Failure(FailureClass.STARTUP, message, observed.now, index=index, replace=True)


def _startup(observed: Observed, status: LLMTrainJobStatus, worker: Worker, what: str, image: bool = False) -> Failure:
    image_name = observed.job.spec.workers.image
    reason = trouble(worker)
    message = f"worker {worker.index} {what}" + (f": {reason}" if reason else "")
    # An image that has trained before is not at fault: another node may be able to pull it.
    fatal = image and status.progress is None
    if fatal:
        message = (
            f"{message}. spec.workers.image is {image_name!r}: correct the name, make sure that the nodes can pull it, "
            "or add imagePullSecrets under spec.workers.template.spec"
        )
    return Failure(
        FailureClass.STARTUP, message, observed.now, worker=worker, index=worker.index, replace=True, fatal=fatal
    )


def trouble(worker: Worker) -> str:
    """Return in one phrase what keeps a worker from running; empty where nothing is known."""
    if worker.waiting_reason in PULL_REASONS | BROKEN_REASONS:
        return worker.waiting_reason + (f" ({worker.waiting_message})" if worker.waiting_message else "")
    return worker.unschedulable_message
