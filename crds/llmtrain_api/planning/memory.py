"""Bytes that a rank needs: weights, gradients, optimizer state, activations.

Sharding as in ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) and FSDP2; activations after Korthikanti et al. 2022
(arXiv:2205.05198, sections 4 and 5), counted anew for this model: RMSNorm, grouped queries, SwiGLU, attention that
keeps no scores (Dao et al. 2022, FlashAttention), no dropout. What differs from Megatron-LM is what this trainer does:
RMSNorm keeps an fp32 copy of its input, and what tensor parallel gathers is kept, not gathered again.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain_api.planning.layout import BUCKET_BYTES, FP32, Layout, Stage, layers_together
from llmtrain_api.planning.schedule import waiting

ROUTER_COPIES = 4
"""fp32 tensors [tokens, experts] that a router keeps: logits, chances, what the two losses need."""
_LOGIT_BYTES = {2: 12, 4: 12}
"""Of one logit while its loss goes backward: log-softmax, its gradient, the logit's gradient, each fp32."""
_CUT_LOGIT_BYTES = {2: 10, 4: 8}
"""The same where ranks share the vocabulary, whose loss works in place."""


@dataclass(frozen=True)
class Elements:
    """Parameters on one rank, before data ranks shard them."""

    rest: float
    experts: float

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.rest + other.rest, self.experts + other.experts)

    def times(self, number: int) -> Elements:
        return Elements(self.rest * number, self.experts * number)

    @property
    def total(self) -> float:
        return self.rest + self.experts


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment of a step when it needs most."""

    weights: float
    """fp32 shards, and what is gathered of them in the type of compute."""
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


class Weights:
    """Parameters of a layout's parts, in elements on one rank before data ranks shard them."""

    def __init__(self, layout: Layout) -> None:
        dims, tensor = layout.work.dims, layout.axes.tensor
        attention = dims.attention_parameters() / tensor + 2 * dims.dim
        self.dense = Elements(attention + 3 * dims.dim * dims.ffn_dim / tensor, 0.0)
        self.mixture = self.dense
        if dims.moe:
            expert = 3 * dims.dim * dims.moe.ffn_dim / tensor
            rest = attention + dims.moe.experts * dims.dim + dims.moe.shared_experts * expert
            self.mixture = Elements(rest, dims.moe.experts * expert / layout.axes.expert)
        self.embedding = dims.vocab_size * dims.dim / tensor
        self.head = self.embedding + dims.dim
        largest = max(0.0 if dims.moe else self.dense.total, self.mixture.total)
        self.layers_together = layers_together(largest)
        self.unit = self.layers_together * largest
        """Elements of what FSDP2 gathers at once."""

    def ends(self, stage: Stage) -> Elements:
        """Return the root's own parameters: what lies in no layer."""
        return Elements(stage.first * self.embedding + stage.last * self.head, 0.0)

    def layers(self, stage: Stage) -> Elements:
        return self.dense.times(stage.dense) + self.mixture.times(stage.mixtures)

    def of(self, stage: Stage) -> Elements:
        return self.layers(stage) + self.ends(stage)


class Activations:
    """Bytes that one micro-batch keeps between forward and backward on one rank, by part of the model."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._dims, self._tensor = layout.work.dims, layout.axes.tensor
        self._tokens, self._size = layout.tokens, layout.work.compute_bytes
        self.whole = {False: self._attention() + self._dense(), True: self._attention() + self._mixture()}
        """Of a layer, by whether it is a mixture of experts, when nothing is computed again."""
        self.kept = {mixture: self._kept(mixture) for mixture in (False, True)}
        """Of a layer, under the layout's kind of recomputation."""
        self.logits = self._logits()
        head_input = self._norm() + self._stream(whole=True)
        self.head = head_input + FP32 * self._tokens * self._dims.vocab_size / self._tensor
        """What a waiting micro-batch keeps behind the last layer."""

    def stage(self, stage: Stage) -> float:
        """Return what one waiting micro-batch keeps of a stage."""
        layers = stage.dense * self.kept[False] + stage.mixtures * self.kept[True]
        return layers + stage.last * self.head + self._stream(whole=False) + self._mask()

    def again(self, stage: Stage) -> float:
        """Return what one layer makes again in backward, at most."""
        if self._layout.axes.recompute == "none":
            return 0.0
        return max(self.whole[True] if stage.mixtures else 0.0, self.whole[False] if stage.dense else 0.0)

    def _stream(self, *, whole: bool) -> float:
        """Return the residual stream's bytes: of all tokens, or of this rank's part under tensor parallel."""
        return self._size * self._tokens * self._dims.dim / (1 if whole else self._tensor)

    def _norm(self) -> float:
        return (FP32 + self._size) * self._tokens * self._dims.dim / self._tensor

    def _keys(self) -> float:
        """Return the bytes of keys and values, of the whole sequence; a CPU's kernel gets them for each query head."""
        dims = self._dims
        heads = dims.heads if self._layout.work.on_cpu else dims.kv_heads
        return 2 * self._size * self._tokens * self._layout.axes.context * heads * dims.head_dim / self._tensor

    def _scores(self) -> float:
        """Return what attention keeps in place of scores: the logarithm of each row's sum, fp32."""
        return FP32 * self._tokens * self._dims.heads / self._tensor

    def _mask(self) -> float:
        """Return the bytes of a micro-batch's mask, one for all layers."""
        return self._size * self._tokens * self._dims.sequence_length if self._layout.work.mask_documents else 0.0

    def _attention(self) -> float:
        queries_and_result = 2 * self._stream(whole=False)
        return self._norm() + self._stream(whole=True) + queries_and_result + self._keys() + self._scores()

    def _dense(self) -> float:
        inner = 4 * self._size * self._tokens * self._dims.ffn_dim / self._tensor
        return self._norm() + self._stream(whole=True) + inner

    def _mixture(self) -> float:
        moe = self._dims.moe
        if moe is None:
            return 0.0
        rows = self._tokens * moe.top_k
        router = ROUTER_COPIES * FP32 * self._tokens * moe.experts
        travelled = (self._size + FP32) * rows * self._dims.dim
        inner = 4 * self._size * (rows + self._tokens * moe.shared_experts) * moe.ffn_dim / self._tensor
        return self._norm() + self._stream(whole=True) + router + travelled + inner

    def _kept(self, mixture: bool) -> float:
        kind, dims = self._layout.axes.recompute, self._dims
        if kind == "none":
            return self.whole[mixture]
        own_input = self._stream(whole=False)
        if kind == "full":
            return own_input
        made = (2 * dims.heads + 2 * dims.kv_heads) * dims.head_dim  # queries, keys, values, attention's result
        attention = self._size * self._tokens * made / self._tensor + self._scores() + self._stream(whole=True)
        if mixture and dims.moe:  # attention and experts apart; the rest keeps what it keeps
            halves = 2 * self._size * self._tokens * dims.moe.top_k * dims.moe.ffn_dim / self._tensor
            return own_input + attention + self._mixture() - halves
        inner = 2 * self._size * self._tokens * dims.ffn_dim / self._tensor
        return own_input + attention + inner + self._stream(whole=True)

    def _logits(self) -> float:
        """Return what the loss needs beyond `head` while it goes backward."""
        each = (_LOGIT_BYTES if self._tensor == 1 else _CUT_LOGIT_BYTES)[self._size]
        return (each - FP32) * self._tokens * self._dims.vocab_size / self._tensor


def needed(layout: Layout, pipeline: list[list[Stage]]) -> Memory:
    """Return the memory of the rank that needs most. `pipeline`: what each of its ranks holds."""
    weights, activations = Weights(layout), Activations(layout)
    # Of ranks that hold the same, the first has most micro-batches waiting.
    firsts: dict[tuple[Stage, ...], int] = {}
    for rank, stages in enumerate(pipeline):
        firsts.setdefault(tuple(stages), rank)
    ranks = (_of_rank(layout, rank, pipeline[rank], weights, activations) for rank in firsts.values())
    return max(ranks, key=lambda memory: memory.total)


def _of_rank(layout: Layout, rank: int, stages: list[Stage], weights: Weights, activations: Activations) -> Memory:
    axes = layout.axes
    layers, ends = Elements(0.0, 0.0), 0.0
    for stage in stages:
        layers += weights.layers(stage)
        ends += weights.ends(stage).total
    own_ends = ends / layout.shards
    own = own_ends + layers.rest / layout.shards + layers.experts / layout.expert_shards
    held = waiting(axes.pipeline_schedule, rank, axes.pipeline, layout.micro_batches)
    kept = held * sum(activations.stage(stage) for stage in stages)
    at_once = max(activations.again(stage) for stage in stages)
    loss = activations.logits if any(stage.last for stage in stages) else 0.0
    return Memory(
        weights=FP32 * own + _whole_weights(layout, weights, layers, ends),
        gradients=_gradients(layout, weights, layers, ends, own),
        optimizer=FP32 * (layout.work.moments * (own - own_ends) + layout.work.end_moments * own_ends),
        activations=kept + max(at_once, loss),
    )


def _whole_weights(layout: Layout, weights: Weights, layers: Elements, ends: float) -> float:
    """Return the bytes of what is gathered or copied of weights in the type of compute."""
    axes, size = layout.axes, layout.work.compute_bytes
    if layout.flat and layout.shards == layout.expert_shards == 1 and size == FP32:
        return 0.0  # what the optimizer moves and what the model computes with are the same memory
    if layout.flat:
        return size * (layers.total + ends)
    unit = weights.unit
    # With a pipeline FSDP frees nothing between backward passes, whatever the stage of ZeRO.
    gathered = layers.total if axes.pipeline > 1 or axes.zero_stage < 3 else min(layers.total, 2 * unit)
    return size * (gathered + ends)


def _gradients(layout: Layout, weights: Weights, layers: Elements, ends: float, own: float) -> float:
    """Return the bytes of gradients when there are most of them."""
    size, unit = layout.work.compute_bytes, weights.unit
    earlier = own if layout.reductions > 1 else 0.0  # sums of an earlier reduction of the step
    if layout.flat:  # packed whole, in buckets; what is sent in one lives until all have arrived
        whole = layers.total + ends
        return FP32 * (whole + earlier) + min(BUCKET_BYTES, FP32 * whole)
    if layout.accumulates:
        # Each group's gradients become shards and are let go: what is whole is never beside all that is sharded,
        # unless an earlier reduction of the step has left its shards.
        return FP32 * (layers.total + ends + max(ends, min(layers.total, unit)) + earlier)
    # Some in the type of compute, with the fp32 copy that is reduced.
    return FP32 * own + (size + FP32) * max(ends, min(layers.total, 2 * unit))
