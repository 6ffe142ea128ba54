"""Collectives along the sequence that autograd can pass: each one's backward is the other.

Own functions, because torch.distributed.nn's all_gather gives wrong gradients on gloo for non-contiguous ones.
Activations are [B, L, D]; ranks hold consecutive parts of L.
"""

from __future__ import annotations

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


def gather_sequence(part_BLD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole sequence on every rank; backward sums the ranks' gradients and keeps the own part."""
    whole: Tensor = _Gather.apply(part_BLD, group)
    return whole


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
