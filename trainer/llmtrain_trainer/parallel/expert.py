"""Expert parallel: each rank of the axis holds some of the experts, and tokens travel to theirs and back.

Nothing is dropped or padded: ranks first tell each other how many rows will come, then exchange exactly those. The axis
lies across dp_shard and cp, whose ranks hold different tokens; what remains of them shards each expert (FSDP).

Sources: Lepikhin et al. 2020 (GShard), Gale et al. 2022 (MegaBlocks: dropless).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain_trainer.model.moe import ExpertMatrix, Experts
from llmtrain_trainer.model.transformer import Transformer
from llmtrain_trainer.parallel.pieces import Cut


def spread_experts(model: Transformer, group: dist.ProcessGroup) -> dict[str, tuple[Cut, ...]]:
    """Leave this rank its experts of a model without memory (meta device); return which parameter was cut how."""
    for mixture in model.mixtures().values():
        for matrix in mixture.experts.children():
            assert isinstance(matrix, ExpertMatrix)
            whole = matrix.weight
            part = torch.empty(whole.shape[0] // group.size(), *whole.shape[1:], dtype=whole.dtype, device=whole.device)
            matrix.weight = nn.Parameter(part)
        mixture.compute = partial(_compute_there, group=group)
    cut = Cut("ep", 0, group.rank(), group.size())
    return {name: (cut,) for name, _ in model.named_parameters() if ".experts." in name}


def _compute_there(x_PD: Tensor, counts_X: Tensor, experts: Experts, group: dist.ProcessGroup) -> Tensor:
    """Send rows, which lie expert by expert, to the ranks that hold their experts; return what comes back for each."""
    sent_RX = counts_X.view(group.size(), -1)
    received_RX = torch.empty_like(sent_RX)
    dist.all_to_all_single(received_RX, sent_RX.contiguous(), group=group)
    sent, received = torch.stack((sent_RX.sum(dim=1), received_RX.sum(dim=1))).tolist()
    rows_PD = _exchange(x_PD, received, sent, group)
    order_P = _by_expert(received_RX)
    y_PD = experts(rows_PD.index_select(0, order_P), received_RX.sum(dim=0))
    back_PD = torch.zeros_like(y_PD).index_copy(0, order_P, y_PD)
    return _exchange(back_PD, sent, received, group)


def _by_expert(received_RX: Tensor) -> Tensor:
    """Return the order that turns rows by (source, expert) into rows by (expert, source)."""
    ranks, experts = received_RX.shape
    own_RX = torch.arange(experts, device=received_RX.device).expand(ranks, experts)
    return own_RX.flatten().repeat_interleave(received_RX.flatten()).argsort(stable=True)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = sent, received, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], *ctx.back), None, None, None


def _exchange(rows_PD: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send so many consecutive rows to each rank, and return what is received; backward goes the way back."""
    rows: Tensor = _Exchange.apply(rows_PD, received, sent, group)
    return rows


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
