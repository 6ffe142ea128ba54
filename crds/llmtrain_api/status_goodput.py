"""Where a job's wall time went: the ledger under `status.goodput`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmtrain_api.constants import GoodputPart
from llmtrain_api.meta import Count32, Count64, LenientModel, Timestamp

MAX_MARKS = 16


class GoodputParts(LenientModel):
    """Milliseconds by what they went into."""

    scheduling: Count64 = 0
    """Until every worker had its node."""
    start: Count64 = 0
    """From there to the end of the first optimizer step: images, rendezvous, compilation."""
    compute: Count64 = 0
    """Steps that count."""
    checkpoint_stall: Count64 = 0
    """Steps waited for a checkpoint, and the time from the last step to the end of a job that succeeded."""
    redone: Count64 = 0
    """Steps that were lost with a failure, and made again."""
    hang: Count64 = 0
    """From the last step before a hang to its verdict."""
    restart: Count64 = 0
    """From a fault to the end of the next attempt's first step."""
    suspended: Count64 = 0
    """Suspended by the owner."""
    idle: Count64 = 0
    """Nothing of these: not looked at yet, blocked, or of before there was a ledger."""

    def total(self) -> int:
        """Return the sum in milliseconds."""
        return sum(getattr(self, name) for name in type(self).model_fields)


class GoodputMark(LenientModel):
    """How much of the time of steps that count had passed when a step was done."""

    step: Count64
    """The optimizer step."""
    compute_milliseconds: Count64
    """milliseconds.compute at its end."""


class GoodputStatus(LenientModel):
    """Where the wall time went. It is written along with other changes, never for its own sake."""

    percent: Annotated[str, Field(max_length=8)] = "0.0"
    """Of the time since the job's creation, what went into steps that count."""
    accounted_until: Timestamp
    """All time from the job's creation to this moment is in milliseconds."""
    milliseconds: GoodputParts = GoodputParts()
    """By part; together exactly the time from the job's creation to accountedUntil."""
    accelerator_hours: Annotated[str, Field(max_length=32)] = "0.00"
    """Hours times the accelerators that the job's workers held, over all parts."""
    cost: Annotated[str, Field(max_length=32)] = ""
    """acceleratorHours times the operator's price for one of them; empty where it knows none."""
    accelerator_milliseconds: GoodputParts = GoodputParts()
    """The same by part, in milliseconds. Time with fewer or no workers counts less or nothing."""
    accelerators_held: Count64 = 0
    """Accelerators of the workers that had a node at accountedUntil."""
    part: GoodputPart = GoodputPart.IDLE
    """What the time since accountedUntil goes into, as far as is known."""
    attempt: Count32 = 0
    """The newest attempt whose steps are in here."""
    attempt_checkpoint_stall_milliseconds: Count64 = 0
    """What that attempt has reported of milliseconds.checkpointStall."""
    marks: Annotated[
        list[GoodputMark], Field(max_length=MAX_MARKS, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """By rising steps: a restart from one of them makes what came after it redone."""
