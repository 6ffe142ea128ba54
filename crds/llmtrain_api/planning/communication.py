"""Bytes that a rank sends in a step, by axis, and the time they take.

What is counted is what the trainer's collectives carry: gathers of parameters in the type of compute and sums of
gradients in fp32 (how many depends on zeroStage: trainer, parallel/{flat,fsdp}.py), tensor parallel with sequence
parallel (Korthikanti et al. 2022, section 4.2: two gathers and two scatters a layer and direction), gathered keys and
values (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2), two exchanges of rows a layer and direction between experts
(Lepikhin et al. 2020, GShard), the residual stream between stages, and the sum of gradient shards over replicas (HSDP).
A ring sends (n - 1) / n of the whole from each rank (Thakur et al. 2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmtrain_api.planning.layout import BUCKET_BYTES, FP32, Layout, Stage
from llmtrain_api.planning.machine import Machine
from llmtrain_api.planning.memory import Elements, Weights


@dataclass(frozen=True)
class Load:
    """Of one rank."""

    size: float = 0.0
    """Bytes sent."""
    seconds: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.size + other.size, self.seconds + other.seconds)

    def times(self, number: float) -> Load:
        return Load(self.size * number, self.seconds * number)


NOTHING = Load()


class Links:
    """What collectives cost in a layout on a machine."""

    def __init__(self, layout: Layout, machine: Machine) -> None:
        self._layout, self._machine = layout, machine
        self._extents = layout.extents()
        self._weights = Weights(layout)
        self._stream = layout.work.compute_bytes * layout.tokens * layout.work.dims.dim
        """Bytes of the residual stream of one micro-batch, of all tokens."""

    def tensor(self, stage: Stage) -> tuple[Load, Load]:
        """Return tensor parallel's loads in forward and in backward of a stage, per micro-batch."""
        move = self._collective("tensor", self._stream)
        layers = move.times(4 * stage.layers)
        ends = move.times(stage.first + stage.last)
        sums = self._collective("tensor", FP32 * self._layout.tokens).times(6 * stage.last)
        return layers + ends + sums, layers + ends

    def context(self, stage: Stage) -> Load:
        """Return the load of keys and values, in forward of a stage as in backward, per micro-batch."""
        dims, axes = self._layout.work.dims, self._layout.axes
        rows = self._layout.tokens * axes.context
        size = 2 * self._layout.work.compute_bytes * rows * dims.kv_heads * dims.head_dim / axes.tensor
        return self._collective("context", size).times(stage.layers)

    def experts(self, stage: Stage) -> Load:
        """Return the load of tokens that travel to their experts and back, in forward as in backward, per micro-batch.

        Loads are taken as even: each rank sends as much as it receives.
        """
        moe = self._layout.work.dims.moe
        if moe is None or not stage.mixtures or self._layout.axes.expert == 1:
            return NOTHING
        return self._exchange(self._stream * moe.top_k, *self._extents["expert"]).times(2 * stage.mixtures)

    def between_stages(self) -> Load:
        """Return the load of passing one micro-batch's residual stream on, or its gradient back."""
        degree, stride = self._extents["pipeline"]
        if degree == 1:
            return NOTHING
        ranks, size = self._layout.work.ranks_per_worker, self._stream / self._layout.axes.tensor
        rate = self._machine.inside if degree * stride <= ranks else self._machine.outside
        return Load(size, size / (rate * self._machine.share(ranks)) + self._machine.latency)

    def gather(self, stages: list[Stage]) -> Load:
        """Return the load of gathering all parameters of some stages once; where nothing is sharded there is none."""
        if self._layout.axes.zero_stage == 0:
            return NOTHING
        return self._over_shards(stages, self._layout.work.compute_bytes)

    def reduce(self, stages: list[Stage]) -> Load:
        """Return the load of reducing all their gradients once: to shards, or to the whole, which is two moves."""
        return self._over_shards(stages, FP32).times(1 if self._layout.axes.zero_stage else 2)

    def sum_replicas(self, stages: list[Stage]) -> Load:
        """Return the load of summing the shards of their gradients over replicas once; an all-reduce is two moves."""
        return self._collective("replicate", FP32 * self.own(stages)).times(2)

    def put_together(self, stages: list[Stage]) -> Load:
        """Return the load of bringing cut matrices of layers to muon's owners once, and what is made of them back."""
        if self._layout.copy_ranks == 1 or self._layout.work.optimizer != "muon":
            return NOTHING
        whole = sum((self._weights.layers(stage) for stage in stages), Elements(0.0, 0.0))
        # In one part per rank of tensor parallel already.
        size = self._layout.work.compute_bytes * whole.total / self._layout.sharing
        return self._exchange(size, self._layout.copy_ranks, 1).times(2)

    def own(self, stages: list[Stage]) -> float:
        """Return the parameters of some stages that lie on this rank, sharded."""
        whole = self._whole(stages)
        return whole.rest / self._layout.shards + whole.experts / self._layout.expert_shards

    def _over_shards(self, stages: list[Stage], size: int) -> Load:
        whole = self._whole(stages)
        together = self._weights.layers_together
        messages = sum(math.ceil(stage.layers / together) + stage.first + stage.last for stage in stages)
        if self._layout.flat:
            messages = math.ceil(FP32 * whole.total / BUCKET_BYTES)
        rest = self._collective("shard", size * whole.rest, messages)
        return rest + self._collective("experts' shard", size * whole.experts, messages)

    def _whole(self, stages: list[Stage]) -> Elements:
        return sum(map(self._weights.of, stages), Elements(0.0, 0.0))

    def _exchange(self, size: float, degree: int, stride: int) -> Load:
        """Return the load of sending `size` bytes, spread evenly over all ranks of an axis."""
        seconds = self._machine.exchange_seconds(size, degree, stride, self._layout.work.ranks_per_worker)
        return Load(size * (degree - 1) / degree, seconds)

    def _collective(self, axis: str, size: float, messages: int = 1) -> Load:
        degree, stride = self._extents[axis]
        if degree == 1 or size == 0:
            return NOTHING
        ranks = self._layout.work.ranks_per_worker
        seconds = messages * self._machine.collective_seconds(size / messages, degree, stride, ranks)
        return Load(size * (degree - 1) / degree, seconds)
