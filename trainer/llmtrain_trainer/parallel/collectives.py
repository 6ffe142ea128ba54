"""Collectives along the sequence that autograd can pass: each one's backward is the other.

Own functions, because torch.distributed.nn's all_gather gives wrong gradients on gloo for non-contiguous ones.
Activations are [B, L, D]; ranks hold consecutive parts of L.
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
        return gather(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return scatter_sum(gradients[0], ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scatter_sum(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather(gradients[0], ctx.group), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_sequence(part_BLD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole sequence on every rank; backward sums the ranks' gradients and keeps the own part."""
    whole: Tensor = _Gather.apply(part_BLD, group)
    return whole


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scatter_sequence(partial_BLD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks and keep the own part of the sequence; backward gathers."""
    part: Tensor = _ScatterSum.apply(partial_BLD, group)
    return part


def gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' parts along dim 1."""
    part = part.transpose(0, 1).contiguous()
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole.transpose(0, 1)


def scatter_sum(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and return the own part along dim 1."""
    whole = whole.transpose(0, 1).contiguous()
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole, group=group)
    return part.transpose(0, 1)


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

    On a CPU each rank broadcasts its own: gloo's all-gather takes several times as long.
    """
    whole_NS = own_S.new_empty(group.size(), *own_S.shape)
    if own_S.is_cuda:
        gathering = dist.all_gather_into_tensor(whole_NS, own_S, group=group, async_op=True)
        return lambda: _waited(gathering, whole_NS, own_S)
    whole_NS[group.rank()].copy_(own_S)
    sending = [dist.broadcast(row_S, group=group, group_src=rank, async_op=True) for rank, row_S in enumerate(whole_NS)]

    def wait() -> Tensor:
        for one in sending:
            _waited(one, whole_NS)
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
