"""Context parallel: each rank holds a consecutive part of every sequence, and gathers the others' keys and values.

Everything but attention works token by token. Keys and values of grouped-query attention are a fraction of the
activations, and causal attention needs those of earlier parts only, so all are gathered in one message and masked
(Dubey et al. 2024, Llama 3, arXiv:2407.21783, section 3.3.2). Backward sums the ranks' gradients of keys and values.
torch's own context_parallel has no sharding rule for attention on a CPU (research, e').

Each rank's parameters see a part of the tokens, as in data parallel: FSDP shards over this axis too.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain_trainer.model.documents import added
from llmtrain_trainer.model.transformer import Transformer, attend
from llmtrain_trainer.parallel.collectives import gather_sequence


def spread_context(model: Transformer, group: dist.ProcessGroup) -> None:
    """Let every layer's attention see the whole sequence, of which this rank holds part number `group.rank()`."""

    # The same for all layers, micro-batches and steps.
    causal = cache(lambda length, device, dtype: _causal(length, device, dtype, group))

    def core(q_BLHE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor, mask_BLS: Tensor | None) -> Tensor:
        both_BSKE = gather_sequence(torch.cat((k_BLKE, v_BLKE), dim=2), group)
        k_BSKE, v_BSKE = both_BSKE.chunk(2, dim=2)
        if mask_BLS is None:
            mask_BLS = causal(q_BLHE.shape[1], q_BLHE.device, q_BLHE.dtype)
        return attend(q_BLHE, k_BSKE, v_BSKE, mask_BLS)

    for block in model.blocks():
        block.attention.core = core
    for mixture in model.mixtures().values():
        mixture.router.parts = group.size()
        mixture.router.taken_before = lambda taken: _taken_before(taken, group)


def own_part(whole: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part along the sequence."""
    part = own_positions(whole.shape[dim], group)
    return whole.narrow(dim, part.start, len(part))


def own_positions(length: int, group: dist.ProcessGroup) -> range:
    """Return this rank's positions in sequences of this length."""
    part = length // group.size()
    return range(group.rank() * part, (group.rank() + 1) * part)


def _causal(length: int, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Return the mask of the own L = `length` queries over all S keys, [1, L, S], to be added to scores."""
    keys_S = torch.arange(length * group.size(), device=device)
    queries_L = torch.arange(length, device=device) + group.rank() * length
    return added((keys_S <= queries_L.unsqueeze(1)).unsqueeze(0), dtype)


def _taken_before(taken_BX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return how often earlier parts of the sequences have chosen each expert."""
    parts = taken_BX.new_empty(group.size(), *taken_BX.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1), taken_BX.contiguous(), group=group)
    return parts[: group.rank()].sum(dim=0)
