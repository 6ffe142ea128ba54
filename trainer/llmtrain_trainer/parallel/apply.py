"""FSDP2 over the data ranks: sharding, memory, first values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from llmtrain_trainer.model.init import fill, standard_deviation
from llmtrain_trainer.model.transformer import Transformer
from llmtrain_trainer.parallel.mesh import data_mesh
from llmtrain_trainer.parallel.pieces import Piece, local_of

COMPUTE_TYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(model: Transformer, mesh: DeviceMesh, *, precision: str, zero_stage: Literal[1, 2, 3]) -> FSDPModule:
    """Apply FSDP2 in place (HSDP when the mesh has dp_replicate); return the same model as what it has become.

    Stage 3 frees a block's parameters after forward and gathers them again in backward; stages 2 and 1 keep them whole
    in between (and 1 until the step's last backward, see `at_micro_batch`). Gradients are summed in fp32, never
    averaged: the loss is already divided by the global batch's tokens.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_TYPE[precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the residual stream has the type already, and the rotary tables must stay fp32
    )
    where = data_mesh(mesh)
    for block in model.blocks():
        fully_shard(block, mesh=where, reshard_after_forward=zero_stage == 3, mp_policy=policy)
    # Backward begins with the root's own parameters (the output), so freeing them after forward would only cost.
    root = fully_shard(model, mesh=where, reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return root


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
