"""Events from what changed between two statuses: a plan that is repeated tells nothing twice."""

from __future__ import annotations

from llmtrain_api.constants import ConditionType, State
from llmtrain_api.status import FailureStatus, LLMTrainJobStatus
from llmtrain_operator.core.actions import Event
from llmtrain_operator.core.conditions import is_true
from llmtrain_operator.core.text import count, shorten

PARKED_STATES = frozenset({State.SUSPENDED, State.BLOCKED})


def changes(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> tuple[Event, ...]:
    """Return the events that tell a reader of `kubectl describe` how the job got from the old status to the new one."""
    told = (_parking, _suspicion, _slowness, _failures, _attempts, _skipped, _unsaved, _recovery, _end)
    events = [event for tell in told for event in tell(old, new)]
    return tuple(Event(event.type, event.reason, shorten(event.message)) for event in events)


def _parking(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    if new.state is State.BLOCKED and (old.state is not State.BLOCKED or old.message != new.message):
        return [Event("Warning", "Blocked", new.message)]
    if new.state is State.SUSPENDED and old.state is not State.SUSPENDED:
        return [Event("Normal", "Suspended", new.message)]
    if is_true(old, ConditionType.SUSPENDED) and not is_true(new, ConditionType.SUSPENDED):
        return [Event("Normal", "Resumed", "Going on from the newest checkpoint")]
    return []


def _failures(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    if not new.failures or (old.failures and _identity(old.failures[-1]) == _identity(new.failures[-1])):
        return []
    failure = new.failures[-1]
    if new.state is State.FAILED:
        return []  # said by the event Failed
    where = f" [{failure.pod}{' on ' + failure.node if failure.node else ''}]" if failure.pod else ""
    message = f"{failure.failure_class.value}: {failure.message}{where}; attempt {new.attempt} follows"
    return [Event("Warning", failure.action.value, message)]


def _suspicion(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    """A verdict tells the same once more, by its action."""
    condition = new.condition(ConditionType.HANGING)
    if condition is None or new.attempt != old.attempt or is_true(old, ConditionType.HANGING):
        return []
    return [Event("Warning", "Hanging", condition.message)] if condition.status == "True" else []


def _slowness(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    condition, before = new.condition(ConditionType.STRAGGLING), old.condition(ConditionType.STRAGGLING)
    if condition is None or (before and (before.status, before.message) == (condition.status, condition.message)):
        return []
    if condition.status == "True":
        return [Event("Warning", "Straggling", condition.message)]
    return [Event("Normal", "StragglerGone", "No rank is slower than its peers any more")] if before else []


def _attempts(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    events = []
    if new.nodes_forgiven_at != old.nodes_forgiven_at:
        message = "A worker found no other node: those that were swapped out may be used again"
        events.append(Event("Warning", "NodesForgiven", message))
    if old.workers.desired and new.workers.desired != old.workers.desired and new.attempt > old.attempt:
        message = f"From {old.workers.desired} to {new.workers.desired} workers, from the newest checkpoint"
        events.append(Event("Normal", "Resized", message))
    if new.attempt and not old.attempt and new.state not in PARKED_STATES:
        events.append(Event("Normal", "CreatingWorkers", f"Creating {new.workers.desired} workers"))
    if new.started_attempt > old.started_attempt and new.shape:
        message = f"Attempt {new.started_attempt}: {new.shape.world_size} ranks on {new.workers.desired} workers"
        events.append(Event("Normal", "Started", message))
    return events


def _skipped(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    """Work was lost here that nobody sees in the loss curve of a run that goes on."""
    skipped = new.checkpoint.skipped
    return [Event("Warning", "CheckpointSkipped", skipped)] if skipped and skipped != old.checkpoint.skipped else []


def _unsaved(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    """Training goes on without: what a failure would cost grows unseen."""
    failed = new.checkpoint.failed
    return [Event("Warning", "CheckpointFailed", failed)] if failed and failed != old.checkpoint.failed else []


def _recovery(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    if not new.failures or not old.failures:
        return []
    failure, before = new.failures[-1], old.failures[-1]
    if _identity(failure) != _identity(before) or failure.seconds_to_next_step == before.seconds_to_next_step:
        return []
    lost = "" if failure.lost_steps is None else f", {count(failure.lost_steps, 'step')} repeated"
    message = f"Training again {failure.seconds_to_next_step} s after the failure{lost}"
    return [Event("Normal", "Recovered", message)]


def _end(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> list[Event]:
    if new.state is old.state:
        return []
    if new.state is State.SUCCEEDED:
        return [Event("Normal", "Succeeded", new.message)]
    return [Event("Warning", "Failed", new.message)] if new.state is State.FAILED else []


def _identity(failure: FailureStatus) -> tuple[int, str]:
    return (failure.attempt, failure.at)
