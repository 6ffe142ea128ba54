"""What the formulas read of a job: its model, how ranks share it, and what they do in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from llmtrain_api.presets import ModelDimensions
from llmtrain_api.spec import STAGES_PER_RANK, LLMTrainJobSpec, OptimizerName, Parallelism
from llmtrain_api.stages import layers_of_stages, stages_of_rank

FP32 = 4
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
BUCKET_BYTES = 25 << 20
"""Of fp32 gradients that travel together at least (trainer: parallel/{bucket,fsdp}.py). DDP's choice: large enough for
the bandwidth, small enough to begin before backward ends."""
MOMENTS: dict[OptimizerName, int] = {"adamw": 2, "lion": 1, "muon": 1}
"""fp32 numbers that the optimizer remembers of each parameter of a layer."""


def layers_together(elements: float) -> int:
    """Return how many consecutive layers of so many elements FSDP2 gathers, reduces and frees together."""
    return math.ceil(BUCKET_BYTES / (FP32 * elements))


@dataclass(frozen=True)
class Workload:
    """What stays the same whatever the layout."""

    dims: ModelDimensions
    ranks: int
    ranks_per_worker: int
    global_batch: int
    micro_batch: int
    compute_bytes: int
    """Of a number in compute; parameters, gradients and moments at rest are fp32."""
    optimizer: OptimizerName
    sync_every: int | None
    on_cpu: bool
    mask_documents: bool

    @classmethod
    def of(cls, spec: LLMTrainJobSpec) -> Workload:
        training = spec.training
        return cls(
            dims=spec.model.dimensions(),
            ranks=spec.world_size(),
            ranks_per_worker=spec.ranks_per_worker(),
            global_batch=training.global_batch_size,
            micro_batch=training.micro_batch_size,
            compute_bytes=COMPUTE_BYTES[training.precision],
            optimizer=training.optimizer.name,
            sync_every=training.sync_every_micro_batches,
            on_cpu=spec.workers.device == "cpu",
            mask_documents=spec.data.mask_documents,
        )

    @property
    def moments(self) -> int:
        return MOMENTS[self.optimizer]

    @property
    def end_moments(self) -> int:
        """The same of embedding and output, which muon leaves to adamw."""
        return MOMENTS["adamw" if self.optimizer == "muon" else self.optimizer]

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.dims.sequence_length


@dataclass(frozen=True)
class Layout:
    """A legal layout of a workload: every division below is exact, because the rules of the resource say so."""

    work: Workload
    axes: Parallelism

    @cached_property
    def readers(self) -> int:
        """Ranks that read different samples."""
        return self.work.ranks // (self.axes.tensor * self.axes.context * self.axes.pipeline)

    @cached_property
    def sharing(self) -> int:
        """Data and context ranks that have the same parameters, in one replica."""
        return self.readers // self.axes.replicate * self.axes.context

    @cached_property
    def expert_sharing(self) -> int:
        """The same of an expert, once expert parallelism has taken its part."""
        return self.sharing // self.axes.expert

    @cached_property
    def shards(self) -> int:
        """Ranks over which the fp32 parameters and what the optimizer remembers of them are sharded."""
        return self.sharing if self.axes.zero_stage else 1

    @cached_property
    def expert_shards(self) -> int:
        """The same of an expert."""
        return self.expert_sharing if self.axes.zero_stage else 1

    @cached_property
    def copy_ranks(self) -> int:
        """Ranks over which matrices of layers are cut."""
        return self.shards * self.axes.tensor

    @cached_property
    def flat(self) -> bool:
        """Tell whether parameters lie whole on every data rank, and FSDP2 has no part in it."""
        return self.axes.zero_stage <= 1

    @cached_property
    def micro_batches(self) -> int:
        """Of one rank in one step."""
        return self.work.global_batch // (self.readers * self.work.micro_batch)

    @cached_property
    def tokens(self) -> int:
        """Of one micro-batch on one rank, tensor parallel not counted: its ranks share these."""
        return self.work.micro_batch * self.work.dims.sequence_length // self.axes.context

    @cached_property
    def reductions(self) -> int:
        """How often a step reduces gradients over the data ranks."""
        period = self.work.sync_every or self.micro_batches
        return 1 if self.axes.pipeline > 1 else -(-self.micro_batches // period)

    @cached_property
    def accumulates(self) -> bool:
        """Tell whether whole gradients wait for a reduction: FSDP2 then keeps them unsharded, in fp32."""
        return self.micro_batches > self.reductions

    def extents(self) -> dict[str, tuple[int, int]]:
        """Return each axis' (degree, stride): ranks of a group lie `stride` apart.

        The order is the mesh's: tensor innermost, then context, data, replicate, pipeline (trainer: parallel/mesh.py).
        """
        tensor, context = self.axes.tensor, self.axes.context
        shard = self.sharing // context
        replicate, pipeline = self.axes.replicate, self.axes.pipeline
        return {
            "tensor": (tensor, 1),
            "context": (context, tensor),
            "expert": (self.axes.expert, tensor),
            "shard": (shard * context, tensor),
            "experts' shard": (self.expert_sharing, tensor * self.axes.expert),
            "replicate": (replicate, tensor * context * shard),
            "pipeline": (pipeline, tensor * context * shard * replicate),
        }


@dataclass(frozen=True)
class Stage:
    """Some consecutive layers, and the ends of the model where they are here."""

    dense: int
    """Layers with an ordinary feed-forward network."""
    mixtures: int
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        return self.dense + self.mixtures


def stages_by_rank(dims: ModelDimensions, axes: Parallelism) -> list[list[Stage]]:
    """Return what each rank of a pipeline holds; a model without pipeline is one stage of one rank."""
    if axes.pipeline == 1:
        return [[_stage(dims, range(dims.layers), first=True, last=True)]]
    count = axes.pipeline * STAGES_PER_RANK[axes.pipeline_schedule]
    layers = layers_of_stages(dims, count)
    stages = [_stage(dims, layers[n], first=n == 0, last=n == count - 1) for n in range(count)]
    ranks = range(axes.pipeline)
    return [[stages[n] for n in stages_of_rank(axes.pipeline_schedule, rank, axes.pipeline)] for rank in ranks]


def _stage(dims: ModelDimensions, layers: range, *, first: bool, last: bool) -> Stage:
    mixtures = sum(dims.has_experts(layer) for layer in layers)
    return Stage(len(layers) - mixtures, mixtures, first, last)
