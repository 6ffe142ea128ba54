"""Tensor parallel with sequence parallel: matrices cut over ranks, the residual stream cut along the sequence.

What follows a norm is cut by rows and sees the whole sequence (gathered before); what writes into the residual stream
is cut by columns, and its partial sums are summed and cut along the sequence again. So every rank does 1/n of all
matrix work and holds 1/n of all activations.

Plain local parameters and hooks, no DTensor: its dispatch costs more than the small matrices themselves
(research: 140-310 ms a step beside 58 for FSDP alone on tiny models). The norms' scales are whole on every rank, and
each rank sees a part of the sequence, so their gradients have to be summed: see `sum_replicated`.

Sources: Shoeybi et al. 2019 (Megatron-LM), Korthikanti et al. 2022 (sequence parallelism, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain_trainer.model.moe import ExpertMatrix, MixtureOfExperts
from llmtrain_trainer.model.transformer import Attention, Transformer
from llmtrain_trainer.parallel.collectives import gather_tokens, scatter_tokens
from llmtrain_trainer.parallel.pieces import Cut, Cuts, is_cut
from llmtrain_trainer.parallel.vocabulary import VocabularyEmbedding

ROWS, COLUMNS = 0, 1
CUTS = {"wq": ROWS, "wk": ROWS, "wv": ROWS, "wo": COLUMNS, "gate": ROWS, "up": ROWS, "down": COLUMNS}


def cut_model(model: Transformer, group: dist.ProcessGroup) -> dict[str, tuple[Cut, ...]]:
    """Cut a model, or a stage, that has no memory yet (meta device) in place; return which parameter was cut how.

    heads, kv_heads, ffn_dim, vocab_size and the sequence must be multiples of the group's size.
    """
    for layer in model.blocks():
        _cut_attention(layer.attention, group)
        _cut_feed_forward(layer.feed_forward, group)
        _gathers(layer.feed_forward, group)
        _scatters(layer.feed_forward, group)
    if isinstance(model.embedding, nn.Embedding):
        model.embedding = VocabularyEmbedding(_part(model.embedding.weight, ROWS, group), group)
    if model.output is not None:
        model.output.weight = _part(model.output.weight, ROWS, group)
        _gathers(model.output, group)
    index, degree = group.rank(), group.size()
    dims = {name: _dim_of(name) for name, _ in model.named_parameters()}
    return {name: (Cut("tp", dim, index, degree),) for name, dim in dims.items() if dim is not None}


def sum_replicated(gradients: Mapping[str, Tensor], cuts: Cuts, group: dist.ProcessGroup) -> None:
    """Sum in place, in one reduction, the gradients of parameters that are whole on every rank of the group."""
    replicated = [g for name, g in gradients.items() if not is_cut(cuts.get(name, ()), "tp") and g.numel()]
    if not replicated:
        return
    flat = torch.cat([gradient.flatten() for gradient in replicated])
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in replicated])
    torch._foreach_copy_(replicated, [p.view_as(g) for p, g in zip(parts, replicated, strict=True)])


def _cut_attention(attention: Attention, group: dist.ProcessGroup) -> None:
    attention.heads //= group.size()
    attention.kv_heads //= group.size()
    _cut_linears(attention, group)
    _gathers(attention, group)
    _scatters(attention, group)


def _cut_feed_forward(feed_forward: nn.Module, group: dist.ProcessGroup) -> None:
    """Cut every expert as a dense network is cut. The router stays whole: all ranks send a token the same way."""
    if isinstance(feed_forward, MixtureOfExperts):
        _cut_linears(feed_forward.experts, group)
        if feed_forward.shared is not None:
            _cut_linears(feed_forward.shared, group)
    else:
        _cut_linears(feed_forward, group)


def _cut_linears(module: nn.Module, group: dist.ProcessGroup) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            child.weight = _part(child.weight, CUTS[name], group)
        elif isinstance(child, ExpertMatrix):
            child.weight = _part(child.weight, CUTS[name] + 1, group)


def _part(weight: Tensor, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    shape = list(weight.shape)
    shape[dim] //= group.size()
    return nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))


def _gathers(module: nn.Module, group: dist.ProcessGroup) -> None:
    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_tokens(inputs[0], group), *inputs[1:]

    module.register_forward_pre_hook(hook)


def _scatters(module: nn.Module, group: dist.ProcessGroup) -> None:
    module.register_forward_hook(lambda _, __, output: scatter_tokens(output, group))


def _dim_of(name: str) -> int | None:
    """Return along which dimension the parameter is cut, or None where every rank holds it whole."""
    *_, parent, module, _ = ("", *name.split("."))
    if module in ("embedding", "output"):
        return ROWS
    dim = CUTS.get(module)
    return dim + 1 if dim is not None and parent == "experts" else dim
