"""Collectives over tokens that autograd can pass: each one's backward is the other.

Own functions, because torch.distributed.nn's all_gather gives wrong gradients on gloo for non-contiguous ones.
Activations are [B, L, D]. Shape suffixes: N  ranks of the group     S, X  any shape, the same on all ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _scatter_sum(gradients[0], ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_sum(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.group), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_sequence(part_BLKE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole sequence on every rank; backward sums the ranks' gradients and keeps the own part."""
    parts: Tensor = _Gather.apply(part_BLKE.unsqueeze(0), group)
    return parts.movedim(0, 1).flatten(1, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_tokens(part_BLD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all tokens of the micro-batch on every rank: the inverse of `scatter_tokens`."""
    B, L, D = part_BLD.shape
    whole: Tensor = _Gather.apply(part_BLD.unsqueeze(0), group)
    return whole.view(B, L * group.size(), D)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scatter_tokens(partial_BLD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep the own share of the tokens; backward gathers.

    Shares are consecutive in memory, so that none has to be copied: with several sequences, that is not a part of each.
    The result's shape, [B, L / ranks, D], is that of such a part all the same. What works token by token cannot tell.
    """
    B, L, D = partial_BLD.shape
    ranks = group.size()
    part: Tensor = _ScatterSum.apply(partial_BLD.reshape(ranks, B, L // ranks, D), group)
    return part.squeeze(0)


def _gather(part_1X: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' parts, [N, ...]."""
    return start_gather(part_1X.squeeze(0).contiguous(), group)()


def _scatter_sum(whole_NX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [N, ...] over ranks, and return the own row, [1, ...]."""
    return start_scatter_sum(whole_NX.contiguous(), group)().unsqueeze(0)


def start_scatter_sum(whole_NS: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to sum [N, S] over the N ranks of the group; return what waits for it and gives the own row [S].

    On a CPU rows are exchanged and summed here, in the order of the ranks: gloo's own reduce-scatter takes twice the
    time, because it reduces all rows everywhere.
    """
    if whole_NS.is_cuda:
        own_S = torch.empty_like(whole_NS[0])
        summing = dist.reduce_scatter_tensor(own_S, whole_NS, group=group, async_op=True)
        return lambda: _waited(summing, own_S, whole_NS)
    received_NS = torch.empty_like(whole_NS)
    exchange = dist.all_to_all_single(received_NS, whole_NS, group=group, async_op=True)
    return lambda: _sum_rows(_waited(exchange, received_NS, whole_NS))


def start_gather(own_S: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to gather each rank's [S]; return what waits for it and gives all of them, [N, S].

    On a CPU each rank sends its own to all others: gloo's all-gather takes up to several times as long.
    """
    whole_NS = own_S.new_empty(group.size(), *own_S.shape)
    if own_S.is_cuda:
        gathering = dist.all_gather_into_tensor(whole_NS, own_S, group=group, async_op=True)
        return lambda: _waited(gathering, whole_NS, own_S)
    own = group.rank()
    others = [(own + step) % group.size() for step in range(1, group.size())]
    messages = [dist.P2POp(dist.isend, own_S, group=group, group_peer=rank) for rank in others]
    messages += [dist.P2POp(dist.irecv, whole_NS[rank], group=group, group_peer=rank) for rank in others]
    under_way = dist.batch_isend_irecv(messages) if messages else []
    whole_NS[own].copy_(own_S)

    def wait() -> Tensor:
        for one in under_way:
            _waited(one, whole_NS, own_S)
        return whole_NS

    return wait


def _waited(work: dist.Work | None, result: Tensor, *_kept: Tensor) -> Tensor:
    """Wait; `_kept` are tensors that must live until then."""
    assert work is not None
    work.wait()
    return result


def _sum_rows(rows_NS: Tensor) -> Tensor:
    first, second, *others = rows_NS.unbind()
    total = first + second  # a tensor of its own, so that the rows can go
    for row in others:
        total.add_(row)
    return total
