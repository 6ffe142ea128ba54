"""Embedding and loss when each rank holds some rows of the vocabulary: no rank ever sees all logits.

Source: Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053), section 3.
Shapes: see model/transformer.py; W is V / ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from llmtrain_trainer.parallel.collectives import scatter_tokens


class VocabularyEmbedding(nn.Module):
    """Takes the place of an nn.Embedding, under the same parameter name."""

    def __init__(self, weight_WD: nn.Parameter, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = weight_WD
        self.group = group

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Return this rank's part of the sequence, [B, L / ranks, D], embedded."""
        rows = self.weight.shape[0]
        own_BL = tokens_BL - self.group.rank() * rows
        outside_BL = (own_BL < 0) | (own_BL >= rows)
        x_BLD = functional.embedding(own_BL.masked_fill(outside_BL, 0), self.weight)
        return scatter_tokens(x_BLD.masked_fill(outside_BL.unsqueeze(-1), 0.0), self.group)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NW: Tensor, targets_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        own_N = targets_N - group.rank() * logits_NW.shape[1]
        outside_N = (own_N < 0) | (own_N >= logits_NW.shape[1])
        own_N = own_N.masked_fill(outside_N, 0)
        highest_N = logits_NW.amax(dim=1)
        dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=group)
        shifted_NW = logits_NW - highest_N.unsqueeze(1)
        wanted_N = shifted_NW.gather(1, own_N.unsqueeze(1)).squeeze(1).masked_fill(outside_N, 0.0)
        exponents_NW = shifted_NW.exp_()
        sums_2N = torch.stack((exponents_NW.sum(dim=1), wanted_N))
        dist.all_reduce(sums_2N, group=group)
        ctx.save_for_backward(exponents_NW.div_(sums_2N[0].unsqueeze(1)), own_N, outside_N)
        return (sums_2N[0].log() - sums_2N[1]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        softmax_NW, own_N, outside_N = ctx.saved_tensors
        gradient_NW = softmax_NW.clone()
        hit_N1 = (~outside_N).to(gradient_NW.dtype).unsqueeze(1)
        gradient_NW.scatter_add_(1, own_N.unsqueeze(1), -hit_N1)
        return gradient_NW.mul_(gradients[0]), None, None


def vocabulary_loss_sum(logits_BLW: Tensor, targets_BL: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the summed cross-entropy, fp32 scalar, the same on every rank of the group."""
    loss: Tensor = _CrossEntropySum.apply(logits_BLW.float().flatten(0, 1), targets_BL.flatten(), group)
    return loss
