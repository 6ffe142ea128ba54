"""What is done to the plain model so that ranks share it, in this order: FSDP2 on each block, FSDP2 on the root.

Later stages slot in before FSDP2, outermost last: tensor parallel, expert parallel, recomputation, compile, FSDP2.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmtrain_trainer.model.init import fill_rows, standard_deviation
from llmtrain_trainer.model.transformer import Transformer
from llmtrain_trainer.parallel.mesh import data_mesh

COMPUTE_TYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(model: Transformer, mesh: DeviceMesh, *, precision: str, zero_stage: Literal[2, 3]) -> FSDPModule:
    """Apply FSDP2 in place (HSDP when the mesh has dp_replicate); return the same model as what it has become.

    Stage 3 frees a block's parameters after forward and gathers them again in backward; stage 2 keeps them whole in
    between. Gradients are summed in fp32, never averaged: the loss is already divided by the global batch's tokens.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_TYPE[precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the residual stream has the type already, and the rotary tables must stay fp32
    )
    for block in model.layers.values():
        fully_shard(block, mesh=data_mesh(mesh), reshard_after_forward=zero_stage == 3, mp_policy=policy)
    # Backward begins with the root's own parameters (the output), so freeing them after forward would only cost.
    root = fully_shard(model, mesh=data_mesh(mesh), reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return root


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a model that was built on the meta device its memory, with undefined values."""
    model.to_empty(device=device)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter from (seed, name): each rank draws only its own rows, and all layouts start alike."""
    for name, parameter in model.named_parameters():
        local = local_of(parameter)
        std = standard_deviation(name, model.dims.layers)
        if std is None:
            local.fill_(1.0)
        elif local.numel():
            fill_rows(local, first_row(parameter), name=name, seed=seed, std=std)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; it shares the memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(parameter: torch.Tensor) -> int:
    """Return which row of the whole parameter this rank's part begins with."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0])
