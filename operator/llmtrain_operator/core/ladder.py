"""From a failure to an action: the user's rules first, then the ladder of its class, cheapest rung first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain_api.constants import Action, FailureClass
from llmtrain_api.spec_failure import FailurePolicy, FailureRule
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core import budgets as budget
from llmtrain_operator.core.failures import Failure
from llmtrain_operator.core.text import shorten

_BLAMED = (Action.RESTART_RANKS, Action.REPLACE_WORKER, Action.REPLACE_NODE)
LADDERS: Mapping[FailureClass, tuple[Action, ...]] = {
    FailureClass.USER_ERROR: (Action.FAIL_JOB,),
    FailureClass.OUT_OF_MEMORY: _BLAMED,
    FailureClass.HARDWARE: (Action.REPLACE_NODE,),
    FailureClass.NUMERICS: (Action.RESTART_RANKS,),
    FailureClass.CHECKPOINT: _BLAMED,
    FailureClass.NODE_LOST: (Action.REPLACE_NODE,),
    FailureClass.HANG: _BLAMED,
    FailureClass.CRASH: _BLAMED,
    FailureClass.DISRUPTION: (Action.RESTART_RANKS,),
    FailureClass.STARTUP: _BLAMED,
    FailureClass.COMMUNICATION: (Action.RESTART_RANKS, Action.RESTART_RANKS, Action.REQUEUE),
}
"""Rungs of each class: for its 1st, 2nd ... failure since the committed checkpoint advanced. The last one stays."""
BLAMELESS_CLASSES = frozenset({FailureClass.DISRUPTION, FailureClass.COMMUNICATION, FailureClass.NUMERICS})
"""The worker that reports these is not the one at fault: their rung rises with the class, not with the worker."""
RUNGS = tuple(Action)
"""All actions, cheapest first."""
REPEATS_ALLOWED = 2
"""The same rank with the same error at the same step: so often it is restarted, the next time the job fails."""
OUTSIDE_EXIT_CODES = frozenset({75, 137, 143})
"""Exits that somebody else made: a lost peer, SIGKILL, SIGTERM. They repeat without being the same error."""


@dataclass(frozen=True)
class Choice:
    """What is done about a failure, and why."""

    action: Action
    charged: bool = True
    """Whether it counts against the budget of its class."""
    rule: str = ""
    """The user's rule that decided, for instance spec.failurePolicy.rules[0]; empty for the built-in ladder."""
    reason: str = ""
    """Of FailJob: one word for machines."""
    message: str = ""
    """Of FailJob: why no restart can help, for people."""


def choose(failure: Failure, status: LLMTrainJobStatus, policy: FailurePolicy) -> Choice:
    """Return the cheapest action that can work."""
    name = failure.failure_class.value
    at, rule = _first_match(failure, policy)
    if rule is not None and rule.action == "FailJob":
        return Choice(Action.FAIL_JOB, rule=at, reason=name, message=f"{failure.message} ({at} says FailJob)")
    if failure.fatal and rule is None:
        return Choice(Action.FAIL_JOB, reason=name, message=failure.message)
    if _repeated(failure, status):
        return Choice(Action.FAIL_JOB, rule=at, reason="RepeatedFailure", message=_repeated_message(failure, status))
    charged = rule is None or rule.action != "Ignore"
    has_budget = failure.failure_class is not FailureClass.USER_ERROR
    if charged and has_budget and budget.exhausted(policy.budgets, status.restarts, failure.failure_class):
        return Choice(Action.FAIL_JOB, rule=at, reason=name, message=_exhausted_message(failure, status, policy))
    wanted = _rung(failure, status) if rule is None or rule.action == "Ignore" else Action(rule.action)
    least = Action.REPLACE_WORKER if failure.replace else Action.RESTART_RANKS
    return Choice(max(wanted, least, key=RUNGS.index), charged=charged, rule=at)


def _rung(failure: Failure, status: LLMTrainJobStatus) -> Action:
    ladder = LADDERS[failure.failure_class]
    if failure.index is None or failure.failure_class in BLAMELESS_CLASSES:
        before = status.restarts.since_progress.get(failure.failure_class.value, 0)
    else:
        before = status.restarts.by_worker_since_progress.get(str(failure.index), 0)
    rung = ladder[min(before, len(ladder) - 1)]
    # A user error that a rule lets pass has no rung of its own.
    return Action.RESTART_RANKS if rung is Action.FAIL_JOB else rung


# --- the user's rules ------------------------------------------------------------------------------------------------


def _first_match(failure: Failure, policy: FailurePolicy) -> tuple[str, FailureRule | None]:
    for number, rule in enumerate(policy.rules):
        if _matches(rule, failure):
            return f"spec.failurePolicy.rules[{number}]", rule
    return "", None


def _matches(rule: FailureRule, failure: Failure) -> bool:
    return (
        (not rule.on_exit_codes or failure.exit_code in rule.on_exit_codes)
        and (not rule.on_classes or failure.failure_class in rule.on_classes)
        and (not rule.on_workers or failure.index in rule.on_workers)
        and rule.message_contains.casefold() in failure.message.casefold()
    )


# --- the same again --------------------------------------------------------------------------------------------------


def _repeated(failure: Failure, status: LLMTrainJobStatus) -> bool:
    """Tell whether a program's own error came so often at one step that chance is no explanation."""
    if not failure.of_rank or failure.exit_code is None or failure.exit_code in OUTSIDE_EXIT_CODES:
        return False
    step = status.progress.step if status.progress else None
    latest = status.failures[-REPEATS_ALLOWED:]
    return len(latest) == REPEATS_ALLOWED and all(
        (old.failure_class, old.rank, old.step, old.message)
        == (failure.failure_class, failure.rank, step, shorten(failure.message))
        for old in latest
    )


def _repeated_message(failure: Failure, status: LLMTrainJobStatus) -> str:
    where = f"after step {status.progress.step}" if status.progress else "before the first step"
    return (
        f"{failure.message} ({failure.failure_class.value}, {REPEATS_ALLOWED + 1} times in a row by the same rank "
        f"{where}: it is the program or its data, and another restart cannot help)"
    )


def _exhausted_message(failure: Failure, status: LLMTrainJobStatus, policy: FailurePolicy) -> str:
    """Return why the job fails: the first cause, not the last symptom."""
    name = failure.failure_class.value
    first = budget.first_cause(status, failure.failure_class)
    field = budget.BUDGET_FIELDS[failure.failure_class]
    limit = budget.allowed(policy.budgets, failure.failure_class)
    times = status.restarts.since_progress.get(name, 0) + 1
    return (
        f"{first.message if first else failure.message} ({name}, {times} times without a new checkpoint; "
        f"spec.failurePolicy.budgets.{field} allows {limit} restarts)"
    )
