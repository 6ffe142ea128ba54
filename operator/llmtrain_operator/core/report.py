"""The parts of the status that are for people: state, message, workers, shape, conditions of a job under way."""

from __future__ import annotations

from llmtrain_api.constants import ConditionType, State
from llmtrain_api.status import LLMTrainJobStatus, Shape, WorkersStatus
from llmtrain_operator.core.conditions import (
    REASON_DRAINING,
    REASON_STARTING,
    REASON_TRAINING,
    REASON_WAITING,
    is_true,
    with_condition,
)
from llmtrain_operator.core.deadlines import trouble
from llmtrain_operator.core.gang import Gang, is_connected
from llmtrain_operator.core.hang import with_culprit
from llmtrain_operator.core.names import worker_selector
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.straggler import with_straggler
from llmtrain_operator.core.text import SHORT_LENGTH, shorten


def under_way(
    observed: Observed, status: LLMTrainJobStatus, gang: Gang, stepped: bool, draining: bool
) -> LLMTrainJobStatus:
    """Return the status of a job that is neither parked nor finished."""
    state = _state(observed, status, stepped)
    message = _message(observed, status, gang, state, draining)
    started = status.started_attempt == status.attempt
    status = status.model_copy(
        update={
            "state": state,
            "message": message,
            "observed_generation": max(observed.job.metadata.generation, 0),
            "shape": wanted_shape(observed),
            "workers": _workers(observed, status, gang),
        }
    )
    status = with_condition(observed, status, ConditionType.ACCEPTED, True, "Valid")
    complete = "EveryAgentConnected" if started else REASON_WAITING
    status = with_condition(observed, status, ConditionType.WORKERS_READY, started, complete)
    waiting = REASON_DRAINING if draining else REASON_WAITING
    reason = REASON_TRAINING if stepped else REASON_STARTING if started else waiting
    status = with_condition(observed, status, ConditionType.PROGRESSING, stepped, reason, message)
    status = with_culprit(observed, status, gang, stepped)
    status = with_straggler(observed, status, gang)
    if is_true(status, ConditionType.SUSPENDED):
        status = with_condition(observed, status, ConditionType.SUSPENDED, False, "Resumed")
    return status


def wanted_shape(observed: Observed) -> Shape:
    """Return the shape that the spec asks for."""
    spec = observed.job.spec
    world, parallelism = spec.world_size(), spec.parallelism
    inner = parallelism.tensor * parallelism.context * parallelism.pipeline
    return Shape(
        world_size=world,
        replicate=parallelism.replicate,
        tensor=parallelism.tensor,
        context=parallelism.context,
        pipeline=parallelism.pipeline,
        expert=parallelism.expert,
        # At least 1: a spec that breaks the rules is blocked, but its status must still be one.
        shard=max(1, world // (parallelism.replicate * inner)),
        zero_stage=parallelism.zero_stage,
        pipeline_schedule=parallelism.pipeline_schedule,
        recompute=parallelism.recompute,
    )


def shape_changes(observed: Observed) -> bool:
    """Tell whether the spec asks for another shape than the one in force.

    Neither schedule nor recomputation can change, and an operator of before they were recorded told neither: a running
    job must not be restarted only because they are missing.
    """
    old, wanted = observed.job.status.shape, wanted_shape(observed)
    unrecorded = {"pipeline_schedule": None, "recompute": None}
    return old is not None and old.model_copy(update=unrecorded) != wanted.model_copy(update=unrecorded)


def no_workers(observed: Observed) -> WorkersStatus:
    """Return the workers part of a job that has none by intention."""
    desired = observed.job.spec.workers.replicas
    return WorkersStatus(desired=desired, ready=0, summary=f"0/{desired}", selector=worker_selector(observed.job))


def _workers(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> WorkersStatus:
    desired = len(gang.slots)
    started = status.started_attempt == status.attempt
    # Once an attempt runs, an agent that has not come back to a restarted operator is no news about its worker.
    ready = sum(is_connected(w, observed) or (started and w.agent is None) for w in gang.wanted())
    return WorkersStatus(
        desired=desired,
        ready=ready,
        summary=shorten(f"{ready}/{desired}", SHORT_LENGTH),
        selector=worker_selector(observed.job),
    )


def _state(observed: Observed, status: LLMTrainJobStatus, stepped: bool) -> State:
    if stepped:
        return State.TRAINING
    if status.failures and status.failures[-1].seconds_to_next_step is None:
        return State.RESTARTING
    return State.STARTING if status.started_attempt == status.attempt else State.PENDING


def _message(observed: Observed, status: LLMTrainJobStatus, gang: Gang, state: State, draining: bool) -> str:
    """No counts that change all the time: each new message is a write."""
    spec = observed.job.spec
    workers = f"{spec.workers.replicas} worker" + ("s" if spec.workers.replicas != 1 else "")
    if state is State.TRAINING:
        return f"Training with {spec.world_size()} ranks on {workers}"
    if status.started_attempt == status.attempt:
        what = f"Starting {spec.world_size()} ranks on {workers}"
    elif draining:
        what = "Waiting for the ranks to write a checkpoint before they are started anew"
    else:
        what = f"Waiting for {workers}"
        troubled = next((w for w in gang.wanted() if trouble(w) and not w.agent), None)
        what += f": worker {troubled.index}: {trouble(troubled)}" if troubled else ""
    if state is State.RESTARTING:
        what += f". Attempt {status.attempt} after: {status.failures[-1].message}"
    return shorten(what)
