"""What a model engineer writes under `spec.failurePolicy`: budgets, deadlines, and rules of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmtrain_api.meta import ApiModel, Count32


class Deadlines(ApiModel):
    """Every waiting phase ends. Times in seconds."""

    pending_seconds: Annotated[int, Field(ge=1, le=31_536_000, json_schema_extra={"format": "int32"})] = 1800
    """From a pod's creation until its agent reports."""
    image_pull_seconds: Annotated[int, Field(ge=1, le=31_536_000, json_schema_extra={"format": "int32"})] = 300
    """How long an image may fail to be pulled."""
    start_seconds: Annotated[int, Field(ge=1, le=31_536_000, json_schema_extra={"format": "int32"})] = 1800
    """From the order to start until the first optimizer step of the attempt."""
    stop_seconds: Annotated[int, Field(ge=0, le=86_400, json_schema_extra={"format": "int32"})] = 60
    """Between SIGTERM and SIGKILL: a step and a checkpoint must fit. Also the pods' termination grace."""


class Budgets(ApiModel):
    """Restarts allowed per failure class since the committed checkpoint last advanced. 0: fail at once."""

    out_of_memory: Count32 = 1
    """A rank or its container was killed for want of memory."""
    hardware: Count32 = 6
    """A device is broken, as its node or its device plugin says."""
    numerics: Count32 = 1
    """Loss or gradient was not finite."""
    checkpoint: Count32 = 3
    """A checkpoint could not be written or read."""
    node_lost: Count32 = 20
    """A node went away, or was cut off."""
    hang: Count32 = 4
    """Ranks made no step, although none had ended."""
    crash: Count32 = 6
    """A rank ended by itself, by any other exit code or signal."""
    startup: Count32 = 3
    """A worker or its ranks did not start in time."""
    communication: Count32 = 6
    """Ranks lost each other and no other cause was reported."""


class HangLimits(ApiModel):
    """How long a rank may stay in one part of a step: factor x p99 of its own newest steps + floorSeconds.

    A large floorSeconds turns the detection off.
    """

    factor: Annotated[int, Field(ge=1, le=1000, json_schema_extra={"format": "int32"})] = 3
    """So many times the 99th percentile of the durations of the rank's newest 256 steps."""
    floor_seconds: Annotated[int, Field(ge=1, le=31_536_000, json_schema_extra={"format": "int32"})] = 10
    """So much longer. With the default, a hang is noticed before the process group gives up on it."""


class StragglerPolicy(ApiModel):
    """A rank whose own work (without waiting) takes longer than that of its peers, by medians of 30 s.

    It is named in the condition Straggling within a minute. A gang steps only as fast as its slowest rank.
    """

    slowdown_percent: Annotated[int, Field(ge=10, le=100_000, json_schema_extra={"format": "int32"})] = 50
    """So much more time than the median of its peers, the other ranks of its pipeline stage, makes a rank slow."""
    action: Literal["Report", "ReplaceNode"] = "Report"
    """`ReplaceNode` has its worker, after a checkpoint, replaced on another node: at most once an hour, as `Hardware`,
    and only while that class has budget left. `Report` only tells."""


ClassName = Literal[
    "UserError",
    "OutOfMemory",
    "Hardware",
    "Numerics",
    "Checkpoint",
    "NodeLost",
    "Hang",
    "Crash",
    "Disruption",
    "Startup",
    "Communication",
]
"""The values of FailureClass, as plain text: what a user writes is checked strictly, and a text is no enum."""
RuleAction = Literal["FailJob", "RestartRanks", "ReplaceWorker", "ReplaceNode", "Requeue", "Ignore"]


class FailureRule(ApiModel):
    """What to do about failures that match all that is given here. A rule without a condition matches every failure."""

    on_exit_codes: Annotated[
        list[Annotated[int, Field(ge=1, le=255, json_schema_extra={"format": "int32"})]],
        Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = Field(default=[])
    """Exit codes of the rank or of the worker's container; 128 + N for one that signal N killed, for instance 137."""
    on_classes: Annotated[
        list[ClassName], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})
    ] = Field(default=[])
    """Failure classes, as in status.failures."""
    on_workers: Annotated[list[Count32], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"})] = (
        Field(default=[])
    )
    """Indexes of the workers where it began."""
    message_contains: Annotated[str, Field(max_length=256)] = ""
    """Text that stands in the failure's message, whatever the case of its letters."""
    action: RuleAction
    """`FailJob` ends the job. `RestartRanks`, `ReplaceWorker` (another pod), `ReplaceNode` (a pod on another node) and
    `Requeue` (release all workers, then begin anew) are the rungs of the ladder; more is done where less cannot work.
    `Ignore`: as without the rule, but no budget is charged."""


class FailurePolicy(ApiModel):
    """How much hurt a job takes before it fails with the first cause. May be changed while the job runs."""

    rules: Annotated[
        list[FailureRule], Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default=[])
    """Your own rules, asked before the built-in ones: the first that matches decides."""
    budgets: Budgets = Budgets()
    deadlines: Deadlines = Deadlines()
    hang: HangLimits = HangLimits()
    straggler: StragglerPolicy = StragglerPolicy()
