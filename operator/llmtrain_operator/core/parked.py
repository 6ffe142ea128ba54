"""A job that must not run now: suspended by its owner, or blocked because it cannot be accepted as it stands."""

from __future__ import annotations

from llmtrain_api.constants import ConditionType, State
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core.actions import DeleteWorker, Plan
from llmtrain_operator.core.changes import differs, next_write_at, worth_writing
from llmtrain_operator.core.conditions import is_true, with_condition
from llmtrain_operator.core.events import PARKED_STATES, changes
from llmtrain_operator.core.gang import is_finished
from llmtrain_operator.core.goodput import with_ledger
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.orders import stop_orders
from llmtrain_operator.core.progress import absorb
from llmtrain_operator.core.record import new_attempt
from llmtrain_operator.core.report import no_workers
from llmtrain_operator.core.text import shorten


def is_parked(status: LLMTrainJobStatus) -> bool:
    """Tell whether the status is that of a job without workers by intention."""
    return status.state in PARKED_STATES


def blocking_reason(observed: Observed) -> tuple[str, str] | None:
    """Return (reason, message) of what makes the job unacceptable; None where nothing does."""
    if observed.spec_errors:
        return "InvalidSpec", "; ".join(observed.spec_errors)
    if observed.store_owner:
        store = observed.job.spec.checkpoint.store
        return "StoreConflict", (
            f"spec.checkpoint.store is {store!r}, which the older job {observed.store_owner} uses: one folder belongs "
            "to one job. Use another folder, or delete the older job"
        )
    return None


def plan_parked(observed: Observed) -> Plan:
    """Stop all workers gracefully, so that they leave a checkpoint, and wait.

    The attempt rises at the moment of parking: every rank is then older than what is wanted, and the names of the
    next workers are free.
    """
    old = observed.job.status
    status = absorb(observed, old)
    if old.attempt and not is_parked(old):
        status = new_attempt(observed, status)
    status = _describe(observed, status.model_copy(update={"start_time": None, "workers": no_workers(observed)}))
    status = with_ledger(observed, status)
    delete = tuple(
        DeleteWorker(worker.name, worker.uid)
        for worker in observed.workers
        if not worker.deleting and not is_finished(worker)
    )
    changed, due = worth_writing(observed, status), next_write_at(observed)
    return Plan(
        status=status,
        status_changed=changed,
        delete=delete,
        orders=stop_orders(observed, status.attempt),
        events=changes(old, status) if changed else (),
        requeue_after=max(due - observed.now, 0.0) if differs(old, status) and not changed else None,
    )


def _describe(observed: Observed, status: LLMTrainJobStatus) -> LLMTrainJobStatus:
    reason = blocking_reason(observed)
    if reason:
        state, message = State.BLOCKED, reason[1]
        status = with_condition(observed, status, ConditionType.ACCEPTED, False, *reason)
    else:
        state = State.SUSPENDED
        message = "Workers are released; set spec.suspend to false to go on from the newest checkpoint"
        status = with_condition(observed, status, ConditionType.ACCEPTED, True, "Valid")
    for kind in (ConditionType.WORKERS_READY, ConditionType.PROGRESSING):
        status = with_condition(observed, status, kind, False, state.value)
    suspended = state is State.SUSPENDED
    if suspended or is_true(status, ConditionType.SUSPENDED):
        word = "SuspendedByOwner" if suspended else state.value
        status = with_condition(observed, status, ConditionType.SUSPENDED, suspended, word, message)
    return status.model_copy(
        update={
            "state": state,
            "message": shorten(message),
            "observed_generation": max(observed.job.metadata.generation, 0),
        }
    )
