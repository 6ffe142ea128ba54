"""Restarts allowed per failure class: what was used, what is left, when it refills, how long the next one waits."""

from __future__ import annotations

from llmtrain_api.constants import FailureClass
from llmtrain_api.spec_failure import Budgets
from llmtrain_api.status import FailureStatus, LLMTrainJobStatus, RestartsStatus
from llmtrain_operator.core.observed import Policy

BUDGET_FIELDS = {
    FailureClass.OUT_OF_MEMORY: "outOfMemory",
    FailureClass.HARDWARE: "hardware",
    FailureClass.NUMERICS: "numerics",
    FailureClass.CHECKPOINT: "checkpoint",
    FailureClass.NODE_LOST: "nodeLost",
    FailureClass.HANG: "hang",
    FailureClass.CRASH: "crash",
    FailureClass.STARTUP: "startup",
    FailureClass.COMMUNICATION: "communication",
}
"""Name of each class under spec.failurePolicy.budgets. UserError has none (never restarted), Disruption has none
(restarted for ever: nobody's program is at fault)."""

FREE_RESTARTS = 2
"""So many restarts without progress are immediate; the ones after them wait, each twice as long as the one before,
so that an outage of a minute does not eat a whole budget in a second."""


def allowed(budgets: Budgets, failure_class: FailureClass) -> int | None:
    """Return how many restarts the class may have without progress; None for any number."""
    limits = {
        FailureClass.USER_ERROR: 0,
        FailureClass.OUT_OF_MEMORY: budgets.out_of_memory,
        FailureClass.HARDWARE: budgets.hardware,
        FailureClass.NUMERICS: budgets.numerics,
        FailureClass.CHECKPOINT: budgets.checkpoint,
        FailureClass.NODE_LOST: budgets.node_lost,
        FailureClass.HANG: budgets.hang,
        FailureClass.CRASH: budgets.crash,
        FailureClass.STARTUP: budgets.startup,
        FailureClass.COMMUNICATION: budgets.communication,
    }
    return limits.get(failure_class)


def exhausted(budgets: Budgets, restarts: RestartsStatus, failure_class: FailureClass) -> bool:
    """Tell whether one more restart for this class would exceed its budget."""
    limit = allowed(budgets, failure_class)
    return limit is not None and restarts.since_progress.get(failure_class.value, 0) >= limit


def count(restarts: RestartsStatus, failure_class: FailureClass, charged: bool) -> RestartsStatus:
    """Return the counters with one more restart for this class, and against its budget where it is charged."""
    key = failure_class.value
    since = dict(restarts.since_progress)
    if charged:
        since[key] = since.get(key, 0) + 1
    by_class = {**restarts.by_class, key: restarts.by_class.get(key, 0) + 1}
    return restarts.model_copy(update={"total": restarts.total + 1, "by_class": by_class, "since_progress": since})


def refill(restarts: RestartsStatus) -> RestartsStatus:
    """Return the counters after the committed checkpoint advanced."""
    return restarts.model_copy(update={"since_progress": {}, "by_worker_since_progress": {}})


def first_cause(status: LLMTrainJobStatus, failure_class: FailureClass) -> FailureStatus | None:
    """Return the first failure of this class that counts against its budget, as far back as the list reaches."""
    used = status.restarts.since_progress.get(failure_class.value, 0)
    same = [failure for failure in status.failures if failure.failure_class == failure_class]
    return same[-used:][0] if used and same else None


def backoff_seconds(restarts: RestartsStatus, policy: Policy) -> float:
    """Return how long after the failure the next attempt may start."""
    excess = sum(restarts.since_progress.values()) - FREE_RESTARTS
    if excess <= 0:
        return 0.0
    return min(policy.backoff_seconds * 2.0 ** min(excess, 30), policy.backoff_limit_seconds)
