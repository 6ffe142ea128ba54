"""Write a failure down: one entry, one attempt more, the counters, all in the same status."""

from __future__ import annotations

from llmtrain_api.constants import Action
from llmtrain_api.status import MAX_FAILURES, FailureStatus, LLMTrainJobStatus
from llmtrain_operator.core import budgets
from llmtrain_operator.core.failures import Failure
from llmtrain_operator.core.gang import next_attempt
from llmtrain_operator.core.ladder import BLAMELESS_CLASSES, Choice
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.text import SHORT_LENGTH, shorten
from llmtrain_operator.core.times import to_timestamp


def new_attempt(observed: Observed, status: LLMTrainJobStatus) -> LLMTrainJobStatus:
    """Return the status with the next attempt wanted, without a failure: first start, resize, suspension."""
    return status.model_copy(
        update={"attempt": next_attempt(observed, status), "attempt_started_at": to_timestamp(observed.now)}
    )


def forgive_nodes(observed: Observed, status: LLMTrainJobStatus) -> LLMTrainJobStatus:
    """Return the status with every node allowed again and the next attempt wanted: no other place was found."""
    forgiven = {"nodes_forgiven_at": to_timestamp(observed.now)}
    return new_attempt(observed, status).model_copy(update=forgiven)


def restart(observed: Observed, status: LLMTrainJobStatus, failure: Failure, choice: Choice) -> LLMTrainJobStatus:
    """Return the status with the failure recorded and the next attempt wanted."""
    limits = observed.job.spec.failure_policy.budgets
    charged = choice.charged and budgets.allowed(limits, failure.failure_class) is not None
    restarts = budgets.count(status.restarts, failure.failure_class, charged)
    by_worker = dict(restarts.by_worker_since_progress)
    key = str(failure.index)
    if choice.action is Action.REQUEUE:
        by_worker.clear()
    elif choice.action is Action.REPLACE_NODE:
        by_worker.pop(key, None)  # a worker on another node begins with a clean record
    elif failure.index is not None and failure.failure_class not in BLAMELESS_CLASSES:
        by_worker[key] = by_worker.get(key, 0) + 1
    restarts = restarts.model_copy(update={"by_worker_since_progress": by_worker})
    recorded = with_failure(status, failure, choice)
    return new_attempt(observed, recorded).model_copy(update={"restarts": restarts})


def with_failure(status: LLMTrainJobStatus, failure: Failure, choice: Choice) -> LLMTrainJobStatus:
    """Return the status with the failure at the end of the list; the oldest ones give way."""
    worker = failure.worker
    entry = FailureStatus(
        at=to_timestamp(failure.at),
        attempt=status.attempt,
        failure_class=failure.failure_class,
        worker=failure.index,
        pod=shorten(worker.name, SHORT_LENGTH) if worker else "",
        node=shorten(worker.node, SHORT_LENGTH) if worker else "",
        rank=failure.rank,
        message=shorten(failure.message),
        action=choice.action,
        rule=choice.rule,
        step=status.progress.step if status.progress else None,
    )
    return status.model_copy(update={"failures": [*status.failures, entry][-MAX_FAILURES:]})
