"""From a failure to an action, cheapest rung first: restart ranks, replace the worker, fail with the first cause."""

from __future__ import annotations

from llmtrain_api.constants import Action, FailureClass
from llmtrain_api.spec_failure import Budgets
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core import budgets as budget
from llmtrain_operator.core.failures import Failure

BLAMELESS_CLASSES = frozenset({FailureClass.DISRUPTION, FailureClass.COMMUNICATION})
"""The worker that reports these is not the one at fault."""


def choose(failure: Failure, status: LLMTrainJobStatus, budgets: Budgets) -> Action:
    """Return the cheapest action that can work."""
    if failure.fatal or budget.exhausted(budgets, status.restarts, failure.failure_class):
        return Action.FAIL_JOB
    if failure.replace:
        return Action.REPLACE_WORKER
    if failure.index is None or failure.failure_class in BLAMELESS_CLASSES:
        return Action.RESTART_RANKS
    restarted_before = status.restarts.by_worker_since_progress.get(str(failure.index), 0)
    return Action.REPLACE_WORKER if restarted_before else Action.RESTART_RANKS


def final_message(failure: Failure, status: LLMTrainJobStatus, budgets: Budgets) -> str:
    """Return why the job fails: the first cause, not the last symptom."""
    name = failure.failure_class.value
    if failure.fatal:
        return failure.message
    first = budget.first_cause(status, failure.failure_class)
    field = budget.BUDGET_FIELDS[failure.failure_class]
    limit = budget.allowed(budgets, failure.failure_class)
    times = status.restarts.since_progress.get(name, 0) + 1
    return (
        f"{first.message if first else failure.message} ({name}, {times} times without a new checkpoint; "
        f"spec.failurePolicy.budgets.{field} allows {limit} restarts)"
    )
