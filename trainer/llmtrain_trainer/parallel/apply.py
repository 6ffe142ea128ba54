"""FSDP2 over the data ranks: sharding, memory, first values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from llmtrain_trainer.model.init import fill, standard_deviation
from llmtrain_trainer.model.moe import MixtureOfExperts
from llmtrain_trainer.model.transformer import Transformer
from llmtrain_trainer.parallel.pieces import Piece, local_of

COMPUTE_TYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Meshes:
    """Over which ranks parameters are sharded."""

    data: DeviceMesh
    experts: DeviceMesh | None
    """Where expert parallelism leaves fewer ranks for an expert than for the rest; else None."""


def shard(model: Transformer, meshes: Meshes, *, precision: str, zero_stage: Literal[1, 2, 3]) -> FSDPModule:
    """Apply FSDP2 in place (HSDP when a mesh has two dims); return the same model as what it has become.

    Stage 3 frees a block's parameters after forward and gathers them again in backward; stages 2 and 1 keep them whole
    in between (and 1 until the step's last backward, see `at_micro_batch`). Gradients are summed in fp32, never
    averaged: the loss is already divided by the global batch's tokens.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_TYPE[precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the residual stream has the type already, and the rotary tables must stay fp32
    )
    where, frees = meshes.data, zero_stage == 3
    for block in model.blocks():
        if meshes.experts is not None and isinstance(block.feed_forward, MixtureOfExperts):
            rows = partial(_rows_to_shard, ranks=meshes.experts.shape[-1])
            experts = block.feed_forward.experts
            fully_shard(
                experts, mesh=meshes.experts, reshard_after_forward=frees, mp_policy=policy, shard_placement_fn=rows
            )
        fully_shard(block, mesh=where, reshard_after_forward=frees, mp_policy=policy)
    # Backward begins with the root's own parameters (the output), so freeing them after forward would only cost.
    root = fully_shard(model, mesh=where, reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return root


def _rows_to_shard(weight: nn.Parameter, ranks: int) -> Shard | None:
    """Shard stacked experts by expert, unless some ranks would get more of them than others: then by their rows."""
    uneven = weight.shape[0] % ranks != 0 and weight.shape[1] % ranks == 0
    return Shard(1) if uneven else None


def at_micro_batch(root: FSDPModule, *, sync: bool, last: bool, zero_stage: Literal[1, 2, 3]) -> None:
    """Say whether the next backward reduces gradients, and whether it is the step's last, which in stage 1 frees."""
    root.set_requires_gradient_sync(sync)
    if zero_stage == 1:
        root.set_reshard_after_backward(last)
        root.set_is_last_backward(last)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a model that was built on the meta device its memory, with undefined values."""
    model.to_empty(device=device)


@torch.no_grad()
def initialise(parameters: Mapping[str, Tensor], pieces: Mapping[str, Piece], *, layers: int, seed: int) -> None:
    """Fill every parameter from (seed, name): each rank draws only its own rows, and all layouts start alike."""
    for name, parameter in parameters.items():
        local, piece = local_of(parameter), pieces[name]
        std = standard_deviation(name, layers)
        if std is None:
            local.fill_(1.0)
        elif local.numel():
            fill(local, piece.offsets, piece.shape, name=name, seed=seed, std=std)
