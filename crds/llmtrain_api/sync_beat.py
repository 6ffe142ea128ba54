"""What an agent tells of one rank's heartbeat, and the order of the phases that a rank goes through."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

from llmtrain_api.meta import LenientModel

START_PHASES = (
    "config",
    "rendezvous",
    "checkpoint_verify",
    "data",
    "first_weights",
    "model",
    "checkpoint_load",
    "initialise",
)
STEP_PHASES = ("data_loading", "forward", "pipeline", "backward", "sync_wait", "optimizer", "report", "checkpoint")
FINISH = "finish"
PHASES = (*START_PHASES, *STEP_PHASES, FINISH)
"""In the order in which a rank goes through them: of two ranks in one step, the one further left is behind."""
STACK_BYTES = 2048


class Own(LenientModel):
    """How long a rank's own work takes, without waiting for others: medians per step of about its last 30 s."""

    stage: Annotated[int, Field(ge=0)] = 0
    """Its place in its pipeline: only ranks of one stage have equal work."""
    loading_seconds: FiniteFloat
    """Until its batches are there."""
    compute_seconds: FiniteFloat = 0.0
    """In which it runs, or is queued for a CPU; 0 on a GPU."""
    device_seconds: FiniteFloat = 0.0
    """Of the same small product of matrices on each rank's GPU; 0 on a CPU."""
    step_seconds: FiniteFloat
    """From one step to the next, waiting included."""
    span_seconds: FiniteFloat
    """How much time the medians are of."""


class Beat(LenientModel):
    """Where one running rank stands, as its agent read it for this report."""

    global_rank: Annotated[int, Field(ge=0, le=2**31 - 1)]
    phase: Annotated[str, Field(max_length=32)]
    """One of PHASES, or a newer trainer's."""
    step: int = 0
    """The optimizer step that it is making, counted from 1; 0 before the first one."""
    seconds: FiniteFloat
    """For how long it has been in this phase."""
    limit_seconds: FiniteFloat | None = None
    """How long it may be; None where nothing is known that could say."""
    own: Own | None = None
    """None until it has made some steps."""
    process_state: Annotated[str, Field(max_length=1)] = ""
    """As /proc/PID/stat says it: R, S, D (waits in the kernel), T (stopped)."""
    probed: bool = False
    """It was asked for its stacks since the suspicion arose, and had time to answer."""
    stack: Annotated[str, Field(max_length=STACK_BYTES)] = ""
    """Of its main thread, innermost call first. Empty where it did not answer, or was not asked."""

    @property
    def overdue(self) -> bool:
        return self.limit_seconds is not None and self.seconds > self.limit_seconds

    @property
    def stopped(self) -> bool:
        return self.process_state in ("T", "t")
