"""The job's conditions: for machines. The transition time moves only when the status flips."""

from __future__ import annotations

from typing import Literal

from llmtrain_api.constants import ConditionType
from llmtrain_api.status import Condition, LLMTrainJobStatus
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.text import shorten
from llmtrain_operator.core.times import to_timestamp

REASON_TRAINING = "Training"
REASON_STARTING = "Starting"
REASON_WAITING = "WaitingForWorkers"
REASON_DRAINING = "Draining"
"""Of Progressing: ranks of the last attempt are writing a checkpoint together before the next one may start."""


def with_condition(
    observed: Observed, status: LLMTrainJobStatus, kind: ConditionType, value: bool, reason: str, message: str = ""
) -> LLMTrainJobStatus:
    """Return the status with this condition set."""
    word: Literal["True", "False"] = "True" if value else "False"
    old = status.condition(kind)
    flipped = old is None or old.status != word
    condition = Condition(
        type=kind,
        status=word,
        observed_generation=max(observed.job.metadata.generation, 0),
        last_transition_time=to_timestamp(observed.now) if old is None or flipped else old.last_transition_time,
        reason=reason,
        message=shorten(message),
    )
    others = [c for c in status.conditions if c.type != kind]
    order = list(ConditionType)
    return status.model_copy(update={"conditions": sorted([*others, condition], key=lambda c: order.index(c.type))})


def is_draining(status: LLMTrainJobStatus) -> bool:
    """Tell whether the status says that ranks of an older attempt are given time for a checkpoint."""
    progressing = status.condition(ConditionType.PROGRESSING)
    return progressing is not None and progressing.reason == REASON_DRAINING


def is_true(status: LLMTrainJobStatus, kind: ConditionType) -> bool:
    """Tell whether the status has this condition and it holds."""
    condition = status.condition(kind)
    return condition is not None and condition.status == "True"
