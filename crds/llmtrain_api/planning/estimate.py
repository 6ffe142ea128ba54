"""A step's time, and all else that the plan shows about a layout.

Time is a sum of what cannot run at once: matrix products at a part of the peak (`Machine.efficiency`), everything else
at the speed of memory (the roofline of Williams et al. 2009), collectives that nothing hides, idle pipeline stages, and
the optimizer. FSDP's collectives count only where they outlast the computation beside them. FLOPs after Narayanan et
al. 2021 (arXiv:2104.04473, appendix), with causal attention counted half and only active experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from llmtrain_api.planning.communication import NOTHING, Links, Load
from llmtrain_api.planning.layout import Layout, Stage, Workload, stages_by_rank
from llmtrain_api.planning.machine import Machine
from llmtrain_api.planning.memory import Activations, Memory, needed
from llmtrain_api.planning.muon import muon_flops
from llmtrain_api.planning.schedule import StageTimes, idle_seconds
from llmtrain_api.presets import ModelDimensions
from llmtrain_api.spec import SPLIT_BACKWARD, Parallelism, PipelineSchedule

ATTENTION_BACKWARD = 2.5
"""Matrix products of attention's backward beside its forward's: it makes the scores again (Dao et al. 2022)."""
FORWARD_TRAFFIC = 3.0
"""Bytes that elementwise operations of an eager layer move in forward, as a multiple of those that it keeps: counted in
model/transformer.py, where a norm alone reads and writes its input six times."""
BACKWARD_TRAFFIC = 2 * FORWARD_TRAFFIC
LOGIT_TRAFFIC = 40
"""Bytes that the loss moves per logit, forward and backward: casts, log-softmax, and their gradients."""
OPTIMIZER_TRAFFIC = {1: 44, 2: 40}
"""Bytes moved per parameter, by its moments: gradient norm, clipping, and the rule."""


@dataclass(frozen=True)
class Estimate:
    """What a layout needs and gives."""

    axes: Parallelism
    memory: Memory
    fits: bool
    step_seconds: float
    tokens_per_second: float
    mfu: float
    """Part of all ranks' peak that forward and backward of the model use; what is computed again does not count."""
    bubble: float
    """Part of the step in which the slowest rank waits for other stages."""
    communication: float
    """Part of the step in which it waits for collectives and nothing else."""
    sent: dict[str, float]
    """Bytes that the busiest rank sends in a step, by axis."""


@dataclass(frozen=True)
class _Work:
    """One micro-batch of one rank, in seconds: computing, and waiting for collectives inside of layers."""

    forward: float
    inputs: float
    weights: float
    forward_wait: float
    backward_wait: float

    @property
    def compute(self) -> float:
        return self.forward + self.inputs + self.weights

    @property
    def wait(self) -> float:
        return self.forward_wait + self.backward_wait


def estimate(work: Workload, axes: Parallelism, machine: Machine) -> Estimate:
    """Return what a legal layout of a job needs and gives on a machine."""
    return _Estimator(Layout(work, axes), machine).estimate()


def step_seconds(work: Workload, axes: Parallelism, machine: Machine) -> float:
    """Return the step's time alone, which takes a fraction of an estimate's own time."""
    return _Estimator(Layout(work, axes), machine).times().step


@dataclass(frozen=True)
class _Times:
    """Of one step, in seconds."""

    step: float
    idle: float
    wait: float
    slowest: list[Stage]
    """What the slowest rank holds."""


class _Estimator:
    def __init__(self, layout: Layout, machine: Machine) -> None:
        self.layout, self.machine, self.axes = layout, machine, layout.axes
        self.pipeline = pipeline_of(layout.work.dims, layout.axes.pipeline, layout.axes.pipeline_schedule)
        self.links = Links(layout, machine)
        self.activations = Activations(layout)
        work = layout.work
        self.peak = machine.rank_flops(work.compute_bytes, work.ranks_per_worker)
        self.rate = self.peak * machine.efficiency
        self.bandwidth = machine.memory_bandwidth * machine.share(work.ranks_per_worker)
        self.split = layout.axes.pipeline > 1 and layout.axes.pipeline_schedule in SPLIT_BACKWARD

    def times(self) -> _Times:
        count = self.layout.micro_batches
        # Ranks that hold the same do the same: few kinds of ranks stand for all.
        works = {key: self._work(list(key)) for key in {tuple(stages) for stages in self.pipeline}}
        stages, slowest = max(works.items(), key=lambda item: item[1].compute + item[1].wait)
        held = list(stages)
        idle = self._idle(slowest, count * (slowest.compute + slowest.wait))
        passing = self._passing(len(held)).seconds
        wait = count * slowest.wait + passing + self._data_wait(held, slowest) + self._agreement()
        return _Times(count * slowest.compute + idle + wait + self._optimizer(held), idle, wait, held)

    def estimate(self) -> Estimate:
        times, work = self.times(), self.layout.work
        memory = needed(self.layout, self.pipeline)
        flops = 3 * _forward_flops(work.dims) * work.tokens_per_step
        return Estimate(
            axes=self.axes,
            memory=memory,
            fits=memory.total <= self.machine.rank_memory(work.ranks_per_worker),
            step_seconds=times.step,
            tokens_per_second=work.tokens_per_step / times.step,
            mfu=flops / (times.step * work.ranks * self.peak),
            bubble=times.idle / times.step,
            communication=times.wait / times.step,
            sent=self._sent(times.slowest),
        )

    def _work(self, stages: list[Stage]) -> _Work:
        parts = [self._of_stage(stage) for stage in stages]
        sums = (sum(getattr(part, name) for part in parts) for name in _Work.__dataclass_fields__)
        return _Work(*sums)

    def _of_stage(self, stage: Stage) -> _Work:
        matrices, attention = self._flops(stage)
        again = self.axes.recompute
        kept = stage.dense * self.activations.whole[False] + stage.mixtures * self.activations.whole[True]
        logits = self.layout.tokens * self.layout.work.dims.vocab_size / self.axes.tensor * stage.last
        matrix, scores, moved = matrices / self.rate, attention / self.rate, kept / self.bandwidth
        forward = matrix + scores + FORWARD_TRAFFIC * moved
        loss = LOGIT_TRAFFIC * logits / self.bandwidth
        repeated = {"none": 0.0, "selective": FORWARD_TRAFFIC * moved, "full": forward}[again]
        inputs = matrix + ATTENTION_BACKWARD * scores + BACKWARD_TRAFFIC * moved + repeated + loss
        tensor_forward, tensor_backward = self.links.tensor(stage)
        others = self.links.context(stage) + self.links.experts(stage)
        forward_wait = (tensor_forward + others).seconds
        repeated_wait = 0.0 if again == "none" else forward_wait
        return _Work(forward, inputs, matrix, forward_wait, (tensor_backward + others).seconds + repeated_wait)

    def _flops(self, stage: Stage) -> tuple[float, float]:
        """Return the FLOPs of a stage's forward pass on one rank for one micro-batch: of matrices, of attention."""
        dims, tokens = self.layout.work.dims, self.layout.tokens / self.axes.tensor
        parts = _layer_flops(dims)
        layers = stage.dense * parts.dense + stage.mixtures * parts.mixture
        # A part of a sequence is masked, not causal: no kernel can leave half of its scores out.
        scores = stage.layers * parts.attention * (1 if self.axes.context == 1 else 2)
        return tokens * (layers + stage.last * dims.output_flops()), tokens * scores

    def _idle(self, work: _Work, busy: float) -> float:
        """Return the seconds in which a rank waits for other stages, beside `busy` ones in which it works.

        Where ranks share a CPU's cores, those that wait leave theirs to the others, who are so much faster: then a step
        takes as long as all work does on all cores, or as the pipeline would with a core for each rank.
        """
        if self.axes.pipeline == 1:
            return 0.0
        backward = work.inputs + work.backward_wait
        split = (backward, work.weights) if self.split else (backward + work.weights, 0.0)
        times = StageTimes(work.forward + work.forward_wait, *split)
        idle = idle_seconds(self.axes.pipeline_schedule, self.axes.pipeline, times)
        return max(0.0, self.machine.share(self.layout.work.ranks_per_worker) * (busy + idle) - busy)

    def _passing(self, stages: int) -> Load:
        """Return the load of the residual stream and its gradient, over all micro-batches and this rank's stages."""
        return self.links.between_stages().times(2 * stages * self.layout.micro_batches)

    def _gathers(self) -> tuple[int, int]:
        """Return how often a step gathers all parameters, beside forward and beside backward passes."""
        count = self.layout.micro_batches
        if self.layout.flat:
            return (1, 0)
        if self.axes.pipeline > 1:  # nothing is freed between backward passes: see memory.py
            return (count, 1) if self.axes.zero_stage == 3 else (1, 0)
        return (count, count if self.axes.zero_stage == 3 else 0)

    def _data_wait(self, stages: list[Stage], work: _Work) -> float:
        """Return the seconds of collectives over data ranks that no computation hides."""
        gather = self.links.gather(stages).seconds
        reduce, replicas = self.links.reduce(stages).seconds, self.links.sum_replicas(stages).seconds
        forward, backward = (work.forward, work.inputs + work.weights) if self.machine.overlaps else (0.0, 0.0)
        if self.layout.flat:  # parameters are gathered, and copies of shards summed, between backward and forward
            return gather + replicas + self.layout.reductions * max(0.0, reduce - backward)
        reduce += replicas
        in_forward, in_backward = self._gathers()
        first = gather / max(1, sum(stage.layers for stage in stages)) if self.machine.overlaps else 0.0
        exposed = in_forward * max(0.0, gather - forward) + in_backward * max(0.0, gather - backward)
        return first + exposed + self.layout.reductions * max(0.0, reduce - backward)

    def _agreement(self) -> float:
        """Return the seconds of the one small reduction at the end of a step, over all ranks."""
        return 2 * self.machine.latency * math.ceil(math.log2(self.layout.work.ranks))

    def _optimizer(self, stages: list[Stage]) -> float:
        traffic = OPTIMIZER_TRAFFIC[self.layout.work.moments] * self.links.own(stages) / self.bandwidth
        if self.layout.work.optimizer != "muon":
            return traffic
        return traffic + muon_flops(self.layout, stages) / self.rate + self.links.put_together(stages).seconds

    def _put_together(self, stages: list[Stage]) -> Load:
        return self.links.put_together(stages) if self.layout.work.optimizer == "muon" else NOTHING

    def _sent(self, stages: list[Stage]) -> dict[str, float]:
        count, passing = self.layout.micro_batches, self._passing(len(stages))
        tensor = context = experts = NOTHING
        for stage in stages:
            forward, backward = self.links.tensor(stage)
            again = 1 if self.axes.recompute == "none" else 2
            tensor += forward.times(again) + backward
            context += self.links.context(stage).times(1 + again)
            experts += self.links.experts(stage).times(1 + again)
        gathers = self.links.gather(stages).times(sum(self._gathers()))
        reductions = self.links.reduce(stages).times(self.layout.reductions)
        replicas = self.links.sum_replicas(stages).times(1 if self.layout.flat else self.layout.reductions)
        loads = {
            "tensor": tensor.times(count),
            "context": context.times(count),
            "expert": experts.times(count),
            "pipeline": passing,
            "shard": gathers + reductions + self._put_together(stages),
            "replicate": replicas,
        }
        return {axis: load.size for axis, load in loads.items() if load.size}


@dataclass(frozen=True)
class _LayerFlops:
    """Forward FLOPs of one layer per token."""

    dense: float
    mixture: float
    attention: float


@lru_cache(maxsize=16)
def _layer_flops(dims: ModelDimensions) -> _LayerFlops:
    attention = 2.0 * dims.dim * dims.sequence_length
    mixtures = set(dims.expert_layers())
    by_kind = {kind: [n for n in range(dims.layers) if (n in mixtures) is kind] for kind in (False, True)}
    matrices = {kind: dims.layer_flops(found[0]) - attention if found else 0.0 for kind, found in by_kind.items()}
    return _LayerFlops(matrices[False], matrices[True], attention)


@lru_cache(maxsize=16)
def _forward_flops(dims: ModelDimensions) -> int:
    return dims.flops_per_token()


@lru_cache(maxsize=1024)
def pipeline_of(dims: ModelDimensions, ranks: int, schedule: PipelineSchedule) -> list[list[Stage]]:
    """Return what each rank of a pipeline holds; kept, because layouts by the hundred share it."""
    return stages_by_rank(dims, Parallelism(pipeline=ranks, pipeline_schedule=schedule))
