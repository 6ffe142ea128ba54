"""What a model engineer writes under `spec`. Every field does something; what is left out has a default."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from llmtrain_api.constants import MANAGER
from llmtrain_api.meta import ApiModel, Count32, Positive32
from llmtrain_api.planning.machine import MachineName
from llmtrain_api.spec_failure import FailurePolicy
from llmtrain_api.spec_metrics import Metrics
from llmtrain_api.spec_model import Model
from llmtrain_api.uris import FOLDER_PATTERN, SOURCE_PATTERN, STORE_PATTERN

TEMPLATE_FIELDS = (
    "affinity",
    "containers",
    "dnsConfig",
    "dnsPolicy",
    "enableServiceLinks",
    "hostAliases",
    "hostIPC",
    "hostNetwork",
    "hostPID",
    "hostUsers",
    "imagePullSecrets",
    "initContainers",
    "nodeSelector",
    "os",
    "overhead",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "readinessGates",
    "resourceClaims",
    "resources",
    "runtimeClassName",
    "schedulerName",
    "schedulingGates",
    "securityContext",
    "serviceAccountName",
    "shareProcessNamespace",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
)
"""Fields of a PodSpec that a template may set. The operator keeps the others to itself: restartPolicy and nodeName
(restarts and placement are its work), terminationGracePeriodSeconds (deadlines.stopSeconds), activeDeadlineSeconds (the
job's), host names, and the service account's token (workers hold no credentials)."""


def pod_spec_schema(schema: dict[str, Any]) -> None:
    """Spell the allowed fields out, each of any content, so that a misspelt or reserved one is refused."""
    schema.pop("additionalProperties", None)
    schema["default"] = {}
    schema["properties"] = {
        name: {"x-kubernetes-preserve-unknown-fields": True, "description": f"As {name} of a PodSpec."}
        for name in TEMPLATE_FIELDS
    }


DISK_PATTERN = r"^(/[^\s]*)?$"
SECRET_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
RESOURCE_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
IMAGE_PATTERN = r"^[^\s]+$"


class Accelerator(ApiModel):
    """What one worker asks of its node."""

    resource: Annotated[str, Field(min_length=1, max_length=253, pattern=RESOURCE_PATTERN)] = "nvidia.com/gpu"
    """Extended resource of the accelerator, for instance nvidia.com/gpu or amd.com/gpu."""
    count: Annotated[int, Field(ge=0, le=64, json_schema_extra={"format": "int32"})] = 8
    """How many of them one worker takes. 0 asks for none: CPU only."""


class PodTemplate(ApiModel):
    """An overlay on the worker pod that the operator builds. What the user writes here wins."""

    spec: Annotated[dict[str, Any], Field(json_schema_extra=pod_spec_schema)] = Field(default_factory=dict)
    """Part of a PodSpec: nodeSelector, tolerations, volumes, more containers, or fields of the container `trainer`."""


class Workers(ApiModel):
    """One worker is one pod on one node."""

    replicas: Annotated[int, Field(ge=1, le=4096, json_schema_extra={"format": "int32"})] = 1
    """Number of workers. Changing it moves the job to a new attempt of that size, from the newest checkpoint."""
    accelerator: Accelerator = Accelerator()
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where ranks compute. `auto`: cuda where there is one, else cpu; `cpu`: gloo, on any node."""
    ranks_per_worker: Annotated[int, Field(ge=1, le=64, json_schema_extra={"format": "int32"})] | None = None
    """Trainer processes in each worker. Default: accelerator.count, or 1 where that is 0."""
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE_PATTERN)]
    """Image of the trainer."""
    template: PodTemplate = PodTemplate()


PipelineSchedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"]
STAGES_PER_RANK: dict[PipelineSchedule, int] = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "ZBV": 2,
    "DualPipeV": 2,
}
"""Pipeline stages that each rank of the pipeline holds."""
SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("ZBV", "DualPipeV")
"""Schedules that make the gradients of weights later than those of activations."""


class Parallelism(ApiModel):
    """How the ranks share the model. What no axis takes is sharded."""

    plan_for: MachineName | None = None
    """Leave the other fields out and let the planner choose them: the fastest legal layout that fits this machine, as
    `llmtrain plan` shows it. It stays until the number of ranks changes; status.shape has it. Default: as they say."""
    tensor: Annotated[int, Field(ge=1, le=64, json_schema_extra={"format": "int32"})] = 1
    """Tensor parallel with sequence parallel: ranks that share every matrix and every sequence. Keep it in one node."""
    context: Annotated[int, Field(ge=1, le=64, json_schema_extra={"format": "int32"})] = 1
    """Context parallel, for long sequences: each rank holds a part of every sequence; keys and values are shared."""
    pipeline: Annotated[int, Field(ge=1, le=64, json_schema_extra={"format": "int32"})] = 1
    """Pipeline parallel: groups of ranks that hold consecutive layers, and pass micro-batches on. Between nodes."""
    pipeline_schedule: PipelineSchedule = "1F1B"
    """The order in which stages work. `1F1B` and `GPipe`: one stage per rank. Two stages per rank, for smaller bubbles:
    `Interleaved1F1B`, and `ZBV` and `DualPipeV`, which fill the bubbles with the gradients of weights."""
    expert: Annotated[int, Field(ge=1, le=1024, json_schema_extra={"format": "int32"})] = 1
    """Expert parallel: each of so many ranks holds a part of the experts, and tokens travel to them. They are the ranks
    that shard the model and share its context, so it takes no ranks of its own. Only for a mixture of experts."""
    replicate: Positive32 = 1
    """Outer data-parallel axis: copies of the sharded model (HSDP). Divides the number of ranks."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """3 shards parameters, gradients and optimizer state; 2 keeps parameters whole from forward to backward; 1 keeps
    them whole always, and shards the optimizer state with its fp32 copy: fewest messages, fastest for a model that
    fits; 0 shards nothing."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it. `selective`: all but the results of matrix products and
    attention; `full`: whole layers. The loss stays the same to the bit."""


OptimizerName = Literal["adamw", "lion", "muon"]


class DecidedOptimizer(NamedTuple):
    """The optimizer's settings with the rule's own defaults filled in."""

    name: OptimizerName
    learning_rate: float
    momentum: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


class Optimizer(ApiModel):
    """The rule by which weights move, with clipping by the true global gradient norm."""

    name: OptimizerName = "adamw"
    """`adamw` (Loshchilov and Hutter, 2019); `lion` (Chen et al., 2023), which needs half of the memory, as does `muon`
    (Jordan et al., 2024): matrices inside layers move by orthogonal updates of AdamW's size, all else by adamw."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Peak learning rate, reached after the warm-up. Default: 3e-4; lion: 6e-5."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the running mean of gradients of matrices that muon moves."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the running mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the running mean of squared gradients; of lion's momentum. Default: 0.95; lion: 0.99."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator of the update, against division by zero. Only adamw divides."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] | None = None
    """Applied to matrices only; norms are not decayed. Default: 0.1; lion: 0.01."""
    gradient_clip_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Largest global L2 norm of the gradient; a longer one is scaled down to it."""

    def decided(self) -> DecidedOptimizer:
        """Fill in what depends on the rule."""
        rate, beta2, decay = (6e-5, 0.99, 0.01) if self.name == "lion" else (3e-4, 0.95, 0.1)
        return DecidedOptimizer(
            self.name,
            rate if self.learning_rate is None else self.learning_rate,
            self.momentum,
            self.beta1,
            beta2 if self.beta2 is None else self.beta2,
            self.epsilon,
            decay if self.weight_decay is None else self.weight_decay,
        )


class Schedule(ApiModel):
    """Learning rate over steps: linear warm-up, then the named curve down to the ratio below."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """The curve after the warm-up. `wsd` (warm-up, stable, decay) stays at the peak and falls in the last part."""
    warmup_steps: Count32 = 0
    """Optimizer steps over which the learning rate rises from 0 to its peak; fewer than training.steps."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The last learning rate, as a part of the peak. Not for `constant`."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Part of the steps after the warm-up in which `wsd` falls, linearly."""


class Skipping(ApiModel):
    """Steps whose numbers are no good are not made: weights stay, the data goes on, the step is counted and told."""

    max_in_a_row: Annotated[int, Field(ge=0, le=1000, json_schema_extra={"format": "int32"})] = 3
    """Steps that may be skipped one after another; the next bad one ends the attempt (class Numerics)."""
    spike_sigmas: Annotated[float, Field(ge=1, le=1000)] | None = None
    """Also skip a step whose loss or gradient norm lies so many standard deviations above the last 128 steps. Default:
    off; 6 is usual."""


class LossScale(ApiModel):
    """Dynamic loss scaling, for fp16 only: halved when gradients overflow, doubled after a while without."""

    initial: Positive32 = 65_536
    """The first scale."""
    minimum: Positive32 = 1
    """An overflow at this scale ends the attempt (class Numerics)."""
    growth_steps: Positive32 = 2000
    """Steps without overflow after which the scale is doubled."""
    hysteresis: Annotated[int, Field(ge=1, le=1000, json_schema_extra={"format": "int32"})] = 2
    """The overflow that halves the scale: earlier ones since it was last doubled only skip their step."""


class Training(ApiModel):
    """How long and how to train."""

    steps: Positive32
    """Number of optimizer steps."""
    global_batch_size: Positive32 = 8
    """Sequences per optimizer step, over all ranks. A multiple of ranks times microBatchSize."""
    micro_batch_size: Positive32 = 1
    """Sequences per forward pass of one rank; the rest is gradient accumulation."""
    sync_every_micro_batches: Positive32 | None = None
    """Gradient accumulation: micro-batches from one reduction of the gradient to the next. Default: one reduction for
    the whole step, for the fewest messages; more of them keep less in memory, because what is reduced is sharded."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of parameters in compute; master weights, gradients' reduction and optimizer state stay fp32. fp16, for devices
    without bf16, scales its loss."""
    compile: bool = False
    """Compile each layer with torch.compile: faster steps, a later first one. Needs a C++ compiler in the image."""
    loss_scale: LossScale = LossScale()
    skipping: Skipping = Skipping()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, json_schema_extra={"format": "int64"})] = 1234
    """Of initial weights and of the order of the data."""


class DataSource(ApiModel):
    """A folder, a file or a glob of text: .txt .md .py and the like whole, .jsonl by its field `text`."""

    uri: Annotated[str, Field(min_length=1, max_length=1024, pattern=SOURCE_PATTERN)]
    """pvc://CLAIM/PATH, file:///PATH (a path in the worker), or builtin://python-stdlib."""


class Tokenizer(ApiModel):
    """Bytes (256 values and one end-of-document mark) unless a tokenizer.json is given."""

    uri: Annotated[str, Field(min_length=1, max_length=1024, pattern=FOLDER_PATTERN)] | None = None
    """A Hugging Face tokenizer.json: pvc://CLAIM/PATH or file:///PATH. Left out: bytes."""


class Data(ApiModel):
    """What the model reads."""

    sources: Annotated[
        list[DataSource],
        Field(
            min_length=1,
            max_length=64,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["uri"]},
        ),
    ]
    """Texts to train on, mixed by their size."""
    tokenizer: Tokenizer = Tokenizer()
    mask_documents: bool = False
    """Keeps attention within documents: a sequence is packed from several, and tokens of one do not see another's."""


class Memory(ApiModel):
    """Checkpoints in the memory of each worker (/dev/shm): they outlive every process in the pod, not the pod."""

    every_steps: Positive32 = 10
    """Optimizer steps between them."""
    keep: Annotated[int, Field(ge=1, le=100, json_schema_extra={"format": "int32"})] = 1
    """Kept. While one is written there is one more; each takes as much memory as the state of the worker's ranks."""


class Disk(ApiModel):
    """Checkpoints on a disk of each worker's node."""

    every_steps: Positive32 = 50
    """Optimizer steps between them."""
    keep: Annotated[int, Field(ge=1, le=100, json_schema_extra={"format": "int32"})] = 1
    """Kept. While one is written there is one more."""
    path: Annotated[str, Field(max_length=1024, pattern=DISK_PATTERN)] = ""
    """A folder in the worker: of a volume that workers.template mounts, for instance a disk of the node, which outlives
    the pod. Left out: on the pod's own volume, which outlives every process in it."""


class Checkpoint(ApiModel):
    """Sharded, asynchronous, committed by a manifest with a checksum per file."""

    store: Annotated[str, Field(min_length=1, max_length=1024, pattern=STORE_PATTERN)]
    """pvc://CLAIM/PATH, file:///PATH or s3://BUCKET/PATH, which all workers share. One folder belongs to one job."""
    secret_name: Annotated[str, Field(max_length=253, pattern=SECRET_PATTERN)] = ""
    """For s3: a Secret in the job's namespace whose keys become environment variables of the workers:
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for other servers than AWS, AWS_ENDPOINT_URL. Left out: the identity
    that the cloud gives to the pod."""
    memory: Memory | None = None
    """A faster tier before the store, written more often. A restart goes on from the newest step that every rank can
    read, wherever it lies."""
    disk: Disk | None = None
    """A tier between memory and store."""
    every_steps: Positive32 = 100
    """Optimizer steps between checkpoints. The last step is always saved."""
    every_seconds: Positive32 | None = None
    """Seconds between checkpoints, in place of everySteps: the step nearest to the moment makes one."""
    pace: Literal["fixed", "auto"] = "fixed"
    """`fixed`: as everySteps or everySeconds say. `auto`: in place of both the trainer chooses the interval that loses
    the least time, sqrt(2 * cost of a save * time between failures) (Young, 1974; Daly, 2006), by what it measures."""
    keep: Annotated[int, Field(ge=1, le=1000, json_schema_extra={"format": "int32"})] = 3
    """Committed checkpoints kept. The newest good one is never deleted."""
    keep_every_steps: Positive32 | None = None
    """Checkpoints at multiples of it are made too, and stay for good, beside the `keep` newest. Default: none stays."""


class LLMTrainJobSpec(ApiModel):
    """A training run."""

    suspend: bool = False
    """True: checkpoint, release all workers, and wait. False again: go on from the checkpoint."""
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] = MANAGER
    """Who acts on this job. Any other value: this operator leaves it alone."""
    workers: Workers
    model: Model
    parallelism: Parallelism = Parallelism()
    training: Training
    data: Data
    checkpoint: Checkpoint
    metrics: Metrics = Metrics()
    failure_policy: FailurePolicy = FailurePolicy()
    active_deadline_seconds: Positive32 | None = None
    """The job fails when it has been active (not suspended) this long."""
    ttl_seconds_after_finished: Count32 | None = None
    """The job is deleted this long after it finished."""

    def ranks_per_worker(self) -> int:
        """Trainer processes in each worker, with the default applied."""
        return self.workers.ranks_per_worker or max(1, self.workers.accelerator.count)

    def world_size(self) -> int:
        """Number of ranks."""
        return self.workers.replicas * self.ranks_per_worker()
