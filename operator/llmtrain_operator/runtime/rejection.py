"""What is said about a stored object that does not parse: an older CRD, or none, may have let it pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from llmtrain_api.constants import TERMINAL_STATES, ConditionType, State
from llmtrain_api.job import Metadata
from llmtrain_api.status import Condition, LLMTrainJobStatus
from llmtrain_operator.core.times import to_timestamp

REASON = "InvalidSpec"
MAX_ERRORS_SHOWN = 5


def describe(error: ValidationError) -> str:
    """Return one line that names each wrong field, its value and what is allowed."""
    problems = error.errors(include_url=False, include_context=False)
    shown = [
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']} (got {ascii(problem['input'])[:60]})"
        for problem in problems[:MAX_ERRORS_SHOWN]
    ]
    if len(problems) > MAX_ERRORS_SHOWN:
        shown.append(f"and {len(problems) - MAX_ERRORS_SHOWN} more")
    return "; ".join(shown)


def rejected_status(
    manifest: Mapping[str, Any], error: ValidationError, now: float
) -> tuple[Metadata, LLMTrainJobStatus] | None:
    """Return the job's metadata and its status with Accepted=False, or None where nothing is to be written.

    Nothing is written where it is said already, where the job has finished, and where the stored status itself cannot
    be read: its durable facts (attempt, budgets) must not be lost to a message.
    """
    try:
        metadata = Metadata.model_validate(manifest.get("metadata") or {})
        status = LLMTrainJobStatus.model_validate(manifest.get("status") or {})
    except ValidationError:
        return None
    message = f"{describe(error)}. Fix: correct these fields and apply the job again."[:1024]
    before = status.condition(ConditionType.ACCEPTED)
    if status.state in TERMINAL_STATES or (before is not None and before.message == message):
        return None
    moved = before is None or before.status != "False"
    accepted = Condition(
        type=ConditionType.ACCEPTED,
        status="False",
        observed_generation=metadata.generation,
        last_transition_time=to_timestamp(now) if before is None or moved else before.last_transition_time,
        reason=REASON,
        message=message,
    )
    others = [condition for condition in status.conditions if condition.type != ConditionType.ACCEPTED]
    update = {
        "conditions": [accepted, *others],
        "state": State.BLOCKED,
        "message": message,
        "observed_generation": metadata.generation,
    }
    return metadata, status.model_copy(update=update)
