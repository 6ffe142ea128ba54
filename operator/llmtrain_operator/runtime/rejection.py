"""What is said about a stored object that does not parse: an older CRD, or none, may have let it pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from llmtrain_api.constants import MANAGER, TERMINAL_STATES, ConditionType, State
from llmtrain_api.job import Metadata
from llmtrain_api.status import Condition, LLMTrainJobStatus
from llmtrain_api.validation import validate
from llmtrain_operator.core.times import to_timestamp

REASON = "InvalidSpec"
MAX_ERRORS_SHOWN = 5
MESSAGE_LIMIT = 1024


def describe(manifest: Mapping[str, Any], error: ValidationError) -> str:
    """Return one line that names each wrong field, its value, what is allowed, and the fix."""
    problems = [str(problem) for problem in validate(dict(manifest))]
    # A status that cannot be read is no mistake of the user's, so the validation of manifests does not look at it.
    problems = problems or [
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_context=False)
    ]
    more = len(problems) - MAX_ERRORS_SHOWN
    return "; ".join(problems[:MAX_ERRORS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def rejected_status(
    manifest: Mapping[str, Any], error: ValidationError, now: float
) -> tuple[Metadata, LLMTrainJobStatus] | None:
    """Return the job's metadata and its status with Accepted=False, or None where nothing is to be written.

    Nothing is written where it is said already, where the job has finished or is another's, and where the stored status
    itself cannot be read: its durable facts (attempt, budgets) must not be lost to a message.
    """
    if _is_anothers(manifest):
        return None
    try:
        metadata = Metadata.model_validate(manifest.get("metadata") or {})
        status = LLMTrainJobStatus.model_validate(manifest.get("status") or {})
    except ValidationError:
        return None
    message = describe(manifest, error)[:MESSAGE_LIMIT]
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


def _is_anothers(manifest: Mapping[str, Any]) -> bool:
    spec = manifest.get("spec")
    return isinstance(spec, Mapping) and spec.get("managedBy", MANAGER) != MANAGER
