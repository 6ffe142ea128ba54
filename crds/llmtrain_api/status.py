"""What the operator reports under `status`: the durable facts of a job.

Everything else is rebuilt from pods and agents.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from llmtrain_api.constants import Action, ConditionType, FailureClass, State
from llmtrain_api.meta import Count32, Count64, Int64, LenientModel, Timestamp
from llmtrain_api.spec import Parallelism
from llmtrain_api.status_goodput import GoodputStatus

ShortText = Annotated[str, Field(max_length=256)]
Message = Annotated[str, Field(max_length=1024)]
ATOMIC = {"x-kubernetes-map-type": "atomic"}
"""Server-side apply merges a map key by key, and one whose last key goes becomes null, which its type forbids."""
MAX_FAILURES = 16
"""The newest failures shown; restarts.total counts them all."""


class Condition(LenientModel):
    """A metav1.Condition."""

    type: ConditionType
    """What is told; one condition of each type."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Count64 = 0
    """The generation of the spec that it was told about."""
    last_transition_time: Timestamp
    """When status last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """For programs: why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """For people: why, and what to do."""


class Shape(LenientModel):
    """The shape in force."""

    world_size: Count32
    """Number of ranks."""
    replicate: Count32
    """Copies of the sharded model."""
    shard: Count32
    """Ranks over which one copy is sharded."""
    tensor: Count32 = 1
    """Ranks that share every matrix."""
    context: Count32 = 1
    """Ranks that hold a part of every sequence each."""
    pipeline: Count32 = 1
    """Ranks that hold consecutive layers each."""
    expert: Count32 = 1
    """Ranks that hold a part of the experts each; they are among those of shard and context."""
    zero_stage: Count32
    """As spec.parallelism.zeroStage."""
    pipeline_schedule: ShortText | None = None
    """As spec.parallelism.pipelineSchedule."""
    recompute: ShortText | None = None
    """As spec.parallelism.recompute."""

    def parallelism(self) -> Parallelism | None:
        """Return the layout that has this shape; None where the status does not tell all of it, or nonsense."""
        fields = {name: getattr(self, name) for name in Parallelism.model_fields if name != "plan_for"}
        try:
            return Parallelism(**fields)
        except ValidationError:
            return None


class WorkersStatus(LenientModel):
    """How many workers there are."""

    desired: Count32 = 0
    """Workers that the spec asks for."""
    ready: Count32 = 0
    """Workers whose agent is connected."""
    summary: ShortText = "0/0"
    """ready/desired, for people."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the worker pods, for the scale subresource."""


class ProgressStatus(LenientModel):
    """The newest optimizer step that the operator has reported.

    Numbers that are not integers are strings, as Kubernetes asks.
    """

    step: Count64
    """Optimizer steps done."""
    steps: Count64
    """The step at which the job ends."""
    tokens: Annotated[str, Field(max_length=32)]
    """Tokens trained on."""
    loss: Annotated[str, Field(max_length=32)]
    """Mean loss of the step, in nats per token."""
    tokens_per_second: Annotated[str, Field(max_length=32)]
    """Over all ranks."""
    skipped_steps: Count64 = 0
    """Steps not made, because their loss or gradient was no good; see spec.training.skipping."""
    eta_seconds: Count64 | None = None
    """Time left at this speed."""
    updated_at: Timestamp
    """When the operator took this down."""


class CheckpointStatus(LenientModel):
    """The checkpoint that a restart would take."""

    last_good_step: Int64 = -1
    """Step of the newest committed checkpoint; -1 where there is none."""
    uri: Annotated[str, Field(max_length=1200)] = ""
    """Where it lies."""
    committed_at: Timestamp | None = None
    """When it became complete and valid."""
    skipped: Message = ""
    """Newer checkpoints that the last restart did not trust, and why."""
    failed: Message = ""
    """The newest checkpoint that could not be written, and why. Training goes on; empty again once one is written."""


class RestartsStatus(LenientModel):
    """How often ranks were started again."""

    total: Count32 = 0
    """Restarts since the job began, of any class."""
    by_class: Annotated[dict[str, Count32], Field(max_length=16, json_schema_extra=ATOMIC)] = Field(
        default_factory=dict
    )
    """The same, by failure class."""
    since_progress: Annotated[dict[str, Count32], Field(max_length=16, json_schema_extra=ATOMIC)] = Field(
        default_factory=dict
    )
    """What counts against the budgets: emptied when the committed checkpoint advances."""
    by_worker_since_progress: Annotated[dict[str, Count32], Field(max_length=4096, json_schema_extra=ATOMIC)] = Field(
        default_factory=dict
    )
    """Worker index to failures it caused since the checkpoint advanced: each takes the next rung of the ladder."""


class FailureStatus(LenientModel):
    """One failure: who, where, why, what was done, what it cost."""

    model_config = ConfigDict(populate_by_name=True)

    at: Timestamp
    """When it happened, by the node's clock where that can be believed, else when the operator learned of it."""
    attempt: Count32
    """The attempt that it ended."""
    failure_class: Annotated[FailureClass, Field(alias="class")]
    """The cause."""
    worker: Count32 | None = None
    """Index of the worker where it began."""
    pod: ShortText = ""
    """That worker's pod."""
    node: ShortText = ""
    """That worker's node."""
    rank: Count32 | None = None
    """Global rank that failed first."""
    message: Message
    """For people: what was seen."""
    action: Action
    """What the operator did."""
    rule: ShortText = ""
    """The rule of spec.failurePolicy.rules that decided it; empty for the built-in ladder."""
    step: Count64 | None = None
    """The newest step known when it failed."""
    lost_steps: Count64 | None = None
    """Steps that had to be repeated."""
    seconds_to_next_step: Annotated[str, Field(max_length=32)] | None = None
    """From the failure to the first optimizer step of the next attempt."""


class LLMTrainJobStatus(LenientModel):
    """What the operator reports."""

    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field(default_factory=list)
    """What holds now, for programs and `kubectl wait`."""
    state: State | None = None
    """One word for people; the conditions are the truth."""
    message: Message = ""
    """One sentence for people: what is going on, or what to do."""
    observed_generation: Count64 = 0
    """The generation of the spec that this status is about."""
    attempt: Count32 = 0
    """The incarnation of all ranks that is wanted; 0 before the first."""
    started_attempt: Count32 = 0
    """The newest attempt whose ranks were told to start. Smaller than attempt: workers are still gathering."""
    attempt_started_at: Timestamp | None = None
    """When `attempt` last changed."""
    start_time: Timestamp | None = None
    """When the job was first accepted and not suspended."""
    completion_time: Timestamp | None = None
    """When the job succeeded or failed."""
    nodes_forgiven_at: Timestamp | None = None
    """Nodes that were swapped out before this moment may be used again: there was no other place."""
    shape: Shape | None = None
    workers: WorkersStatus = WorkersStatus()
    progress: ProgressStatus | None = None
    checkpoint: CheckpointStatus = CheckpointStatus()
    restarts: RestartsStatus = RestartsStatus()
    failures: Annotated[
        list[FailureStatus], Field(max_length=MAX_FAILURES, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """The newest failures, oldest first."""
    goodput: GoodputStatus | None = None

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of that type, or None."""
        return next((c for c in self.conditions if c.type == kind), None)
