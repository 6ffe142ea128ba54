"""What the operator reports under `status`: the durable facts of a job. Everything else is rebuilt from pods and agents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from llmtrain_api.constants import Action, ConditionType, FailureClass, State
from llmtrain_api.meta import Count32, Count64, Int64, LenientModel, Timestamp

ShortText = Annotated[str, Field(max_length=256)]
Message = Annotated[str, Field(max_length=1024)]
MAX_FAILURES = 16
"""The newest failures shown; restarts.total counts them all."""


class Condition(LenientModel):
    """A metav1.Condition."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    observed_generation: Count64 = 0
    last_transition_time: Timestamp
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, Field(max_length=32768)] = ""


class Shape(LenientModel):
    """The shape in force."""

    world_size: Count32
    replicate: Count32
    shard: Count32
    zero_stage: Count32


class WorkersStatus(LenientModel):
    desired: Count32 = 0
    ready: Count32 = 0
    """Workers whose agent is connected."""
    summary: ShortText = "0/0"
    """ready/desired, for people."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the worker pods, for the scale subresource."""


class ProgressStatus(LenientModel):
    """The newest optimizer step that the operator has reported. Numbers that are not integers are strings, as
    Kubernetes asks."""

    step: Count64
    steps: Count64
    """The step at which the job ends."""
    tokens: Annotated[str, Field(max_length=32)]
    loss: Annotated[str, Field(max_length=32)]
    tokens_per_second: Annotated[str, Field(max_length=32)]
    eta_seconds: Count64 | None = None
    updated_at: Timestamp


class CheckpointStatus(LenientModel):
    last_good_step: Int64 = -1
    """Step of the newest committed checkpoint; -1 where there is none."""
    uri: Annotated[str, Field(max_length=1200)] = ""
    committed_at: Timestamp | None = None
    skipped: Message = ""
    """Newer checkpoints that the last restart did not trust, and why."""


class RestartsStatus(LenientModel):
    total: Count32 = 0
    by_class: Annotated[dict[str, Count32], Field(max_length=16)] = Field(default_factory=dict)
    since_progress: Annotated[dict[str, Count32], Field(max_length=16)] = Field(default_factory=dict)
    """What counts against the budgets: emptied when the committed checkpoint advances."""
    by_worker_since_progress: Annotated[dict[str, Count32], Field(max_length=4096)] = Field(default_factory=dict)
    """Worker index to in-place restarts it caused since the checkpoint advanced: the second replaces the pod."""


class FailureStatus(LenientModel):
    """One failure: who, where, why, what was done, what it cost."""

    model_config = ConfigDict(populate_by_name=True)

    at: Timestamp
    attempt: Count32
    failure_class: Annotated[FailureClass, Field(alias="class")]
    worker: Count32 | None = None
    pod: ShortText = ""
    node: ShortText = ""
    rank: Count32 | None = None
    message: Message
    action: Action
    step: Count64 | None = None
    """The newest step known when it failed."""
    lost_steps: Count64 | None = None
    """Steps that had to be repeated."""
    seconds_to_next_step: Annotated[str, Field(max_length=32)] | None = None


class LLMTrainJobStatus(LenientModel):
    conditions: Annotated[
        list[Condition],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(default_factory=list)
    state: State | None = None
    """One word for people; the conditions are the truth."""
    message: Message = ""
    """One sentence for people: what is going on, or what to do."""
    observed_generation: Count64 = 0
    attempt: Count32 = 0
    """The incarnation of all ranks that is wanted; 0 before the first."""
    started_attempt: Count32 = 0
    """The newest attempt whose ranks were told to start. Smaller than attempt: workers are still gathering."""
    attempt_started_at: Timestamp | None = None
    """When `attempt` last changed."""
    start_time: Timestamp | None = None
    completion_time: Timestamp | None = None
    shape: Shape | None = None
    workers: WorkersStatus = WorkersStatus()
    progress: ProgressStatus | None = None
    checkpoint: CheckpointStatus = CheckpointStatus()
    restarts: RestartsStatus = RestartsStatus()
    failures: Annotated[
        list[FailureStatus], Field(max_length=MAX_FAILURES, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of that type, or None."""
        return next((c for c in self.conditions if c.type == kind), None)
