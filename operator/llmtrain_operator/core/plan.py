"""The one decision: from what is observed to what the status says and what is done.

Every decision is recomputed from the snapshot. What must survive a restart of the operator is in the status, and the
status is written before anything is touched, so that it can be killed between any two side effects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmtrain_api.constants import MANAGER, TERMINAL_STATES, Action
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core import deadlines, hang, straggler
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.avoid import relax_at
from llmtrain_operator.core.changes import differs, next_write_at, worth_writing
from llmtrain_operator.core.conditions import is_draining
from llmtrain_operator.core.events import changes
from llmtrain_operator.core.failures import (
    Failure,
    gathering_failures,
    primary,
    running_failures,
    settled,
    succeeded,
    unsettled_until,
)
from llmtrain_operator.core.finished import fail, plan_finished, succeed
from llmtrain_operator.core.gang import Gang, assemble, missing_workers, surplus_workers, tidy
from llmtrain_operator.core.goodput import with_ledger
from llmtrain_operator.core.ladder import choose
from llmtrain_operator.core.layout import with_layout
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.orders import gang_orders, is_complete, leavers_may_write, old_ranks_may_run
from llmtrain_operator.core.parked import blocking_reason, is_parked, plan_parked
from llmtrain_operator.core.progress import absorb, has_stepped
from llmtrain_operator.core.record import forgive_nodes, new_attempt, restart, with_failure
from llmtrain_operator.core.report import shape_changes, under_way
from llmtrain_operator.core.times import from_timestamp, to_timestamp


def plan(observed: Observed) -> Plan:
    """Decide everything about one job."""
    job = observed.job
    if job.metadata.deletion_timestamp or job.spec.managed_by != MANAGER:
        return Plan(status=job.status, status_changed=False)
    observed = tidy(observed)
    if job.status.state in TERMINAL_STATES:
        return plan_finished(observed)
    observed = with_layout(observed)
    if blocking_reason(observed) or job.spec.suspend:
        return plan_parked(observed)
    return _plan_under_way(observed)


@dataclass(frozen=True)
class _Course:
    """How far the decision has come: the status so far, and when to look again."""

    status: LLMTrainJobStatus
    draining: bool
    """Ranks of an older attempt are given time for a checkpoint, together."""
    due: tuple[float, ...] = ()


def _plan_under_way(observed: Observed) -> Plan:
    course = _judge(observed, _begin(observed))
    if course.status.state in TERMINAL_STATES:
        return _plan_end(observed, course.status)
    course = _start(observed, course)
    status = course.status
    gang = assemble(observed, status)
    stop_seconds = float(observed.job.spec.failure_policy.deadlines.stop_seconds)
    status = under_way(observed, status, gang, has_stepped(observed, status), course.draining)
    status = with_ledger(observed, status)
    changed, due = worth_writing(observed, status), (*course.due, *_deadlines(observed, status, gang).due)
    if not changed and differs(observed.job.status, status):
        due = (*due, next_write_at(observed))
    return Plan(
        status=status,
        status_changed=changed,
        delete=surplus_workers(gang, course.draining),
        create=missing_workers(observed, status, gang),
        orders=gang_orders(observed, status, gang, stop_seconds if course.draining else 0.0),
        events=changes(observed.job.status, status) if changed else (),
        requeue_after=max(min(due) - observed.now, 0.0) if due else None,
    )


def _plan_end(observed: Observed, status: LLMTrainJobStatus) -> Plan:
    """The plan of the moment in which the job ends: what a finished job gets, and the write that makes it so."""
    status = with_ledger(observed, status)
    ended = observed.job.model_copy(update={"status": status})
    after = plan_finished(replace(observed, job=ended))
    events = changes(observed.job.status, status)
    # A job with a time to live of 0 goes at the next look, after its end is durable.
    look_again = 0.0 if after.delete_job else after.requeue_after
    return replace(after, status_changed=True, delete_job=False, events=events, requeue_after=look_again)


def _begin(observed: Observed) -> _Course:
    """Take in progress; begin the first attempt, or go on after parking, or change the shape."""
    old = observed.job.status
    status = absorb(observed, old)
    now = to_timestamp(observed.now)
    if not old.attempt:
        return _Course(new_attempt(observed, status).model_copy(update={"start_time": now}), draining=False)
    if is_parked(old):  # the attempt rose when it was parked
        return _Course(status.model_copy(update={"start_time": now, "attempt_started_at": now}), draining=False)
    if shape_changes(observed):
        return _Course(new_attempt(observed, status), draining=True)
    return _Course(status, draining=is_draining(old) and old.started_attempt < old.attempt)


def _judge(observed: Observed, course: _Course) -> _Course:
    """Find success, or the one cause of failure, and take the cheapest step that can work."""
    status = course.status
    gang = assemble(observed, status)
    started = status.started_attempt == status.attempt
    if started and succeeded(gang, status, observed.job.spec.ranks_per_worker()):
        return replace(course, status=succeed(observed, status))
    until = deadlines.active_until(observed, status)
    if until is not None and until <= observed.now:
        limit = observed.job.spec.active_deadline_seconds
        message = f"The job was active for {limit} s, the limit that spec.activeDeadlineSeconds sets"
        return replace(course, status=fail(observed, status, "DeadlineExceeded", message))
    course = replace(course, due=() if until is None else (until,))
    broken = running_failures if started else gathering_failures
    cause = primary([*broken(observed, status, gang), *_deadlines(observed, status, gang).failures])
    if cause is None and started:
        cause = straggler.judge(observed, status, gang)
    if cause is None:
        return course if started else _make_room(observed, course)
    settles = unsettled_until(observed, status, gang, cause)
    if settles is not None:
        return replace(course, due=(*course.due, settles))
    return _answer(observed, course, settled(observed, status, gang, cause))


def _make_room(observed: Observed, course: _Course) -> _Course:
    """Let nodes that are avoided be used again where a worker finds no other one."""
    until = relax_at(observed, course.status)
    if until is None:
        return course
    if until > observed.now:
        return replace(course, due=(*course.due, until))
    return replace(course, status=forgive_nodes(observed, course.status))


def _deadlines(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> deadlines.Verdict:
    if status.started_attempt == status.attempt:
        waits = deadlines.running(observed, status, gang, has_stepped(observed, status))
        hangs = hang.judge(observed, status, gang)
        return deadlines.Verdict((*waits.failures, *hangs.failures), (*waits.due, *hangs.due))
    return deadlines.gathering(observed, status, gang)


def _answer(observed: Observed, course: _Course, cause: Failure) -> _Course:
    status = course.status
    choice = choose(cause, status, observed.job.spec.failure_policy)
    if choice.action is Action.FAIL_JOB:
        recorded = with_failure(status, cause, choice)
        return replace(course, status=fail(observed, recorded, choice.reason, choice.message))
    return _Course(restart(observed, status, cause, choice), draining=cause.graceful or course.draining, due=course.due)


def _start(observed: Observed, course: _Course) -> _Course:
    """Start the attempt as soon as its gang is complete, drained and past its back-off."""
    status, due = course.status, course.due
    if status.started_attempt == status.attempt:
        return replace(course, draining=False)
    stop_seconds = float(observed.job.spec.failure_policy.deadlines.stop_seconds)
    drained_at = (from_timestamp(status.attempt_started_at) or observed.now) + stop_seconds
    in_time = observed.now < drained_at
    draining = course.draining and in_time and old_ranks_may_run(observed, status)
    gang = assemble(observed, status)
    leaving = in_time and leavers_may_write(status, gang)
    wait_until = deadlines.backoff_until(observed, status)
    if is_complete(observed, gang) and not draining and not leaving and observed.now >= wait_until:
        status = status.model_copy(update={"started_attempt": status.attempt})
        return replace(course, status=status, draining=False)
    waits = [wait_until] if observed.now < wait_until else []
    waits += [drained_at] if draining or leaving else []
    return _Course(status, draining, (*due, *waits))
