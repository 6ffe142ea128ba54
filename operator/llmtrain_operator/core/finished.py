"""The end of a job: written once, never left again, and cleaned up after."""

from __future__ import annotations

from llmtrain_api.constants import ConditionType, State
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core.actions import DeleteWorker, Plan
from llmtrain_operator.core.conditions import is_true, with_condition
from llmtrain_operator.core.gang import is_finished
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.orders import exit_orders
from llmtrain_operator.core.text import shorten
from llmtrain_operator.core.times import from_timestamp, to_timestamp

EXIT_SECONDS = 10.0
"""So long workers have to obey the order to leave; then they are deleted. Ones that have left stay, for their logs."""


def succeed(observed: Observed, status: LLMTrainJobStatus) -> LLMTrainJobStatus:
    """Return the status of a job all of whose ranks have ended well."""
    steps = f"All {status.progress.steps} steps are done" if status.progress else "All ranks have ended well"
    status = _end(observed, status, State.SUCCEEDED, steps)
    return with_condition(observed, status, ConditionType.COMPLETE, True, "Succeeded", steps)


def fail(observed: Observed, status: LLMTrainJobStatus, reason: str, message: str) -> LLMTrainJobStatus:
    """Return the status of a job that has failed for good. `reason` is one word for machines."""
    status = _end(observed, status, State.FAILED, message)
    return with_condition(observed, status, ConditionType.FAILED, True, reason, message)


def plan_finished(observed: Observed) -> Plan:
    """Let the workers leave, then delete those that did not, then (ttlSecondsAfterFinished) the job."""
    status = observed.job.status
    ended_at = from_timestamp(status.completion_time) or 0.0
    ttl = observed.job.spec.ttl_seconds_after_finished
    if ttl is not None and observed.now >= ended_at + ttl:
        return Plan(status=status, status_changed=False, delete_job=True)
    due = [] if ttl is None else [ended_at + ttl]
    left = [worker for worker in observed.workers if not is_finished(worker)]
    overdue = observed.now >= ended_at + EXIT_SECONDS
    if left and not overdue:
        due.append(ended_at + EXIT_SECONDS)
    delete = tuple(
        DeleteWorker(worker.name, worker.uid)
        for worker in left
        if not worker.deleting and (overdue or (worker.agent is None and worker.phase != "Running"))
    )
    return Plan(
        status=status,
        status_changed=False,
        delete=delete,
        orders=exit_orders(observed, 0 if status.state is State.SUCCEEDED else 1),
        requeue_after=min(due) - observed.now if due else None,
    )


def _end(observed: Observed, status: LLMTrainJobStatus, state: State, message: str) -> LLMTrainJobStatus:
    status = with_condition(observed, status, ConditionType.PROGRESSING, False, state.value)
    status = with_condition(observed, status, ConditionType.WORKERS_READY, False, state.value)
    if is_true(status, ConditionType.STRAGGLING):
        status = with_condition(observed, status, ConditionType.STRAGGLING, False, state.value)
    return status.model_copy(
        update={
            "state": state,
            "message": shorten(message),
            "completion_time": to_timestamp(observed.now),
            "observed_generation": max(observed.job.metadata.generation, 0),
        }
    )
