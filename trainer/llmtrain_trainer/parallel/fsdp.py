"""Stages 2 and 3 of ZeRO: FSDP2 over the data ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmtrain_api.planning.layout import BUCKET_BYTES, FP32
from llmtrain_trainer.model.moe import MixtureOfExperts
from llmtrain_trainer.model.transformer import Transformer
from llmtrain_trainer.parallel.apply import COMPUTE_TYPE, Meshes, Sharing, materialise, named_parameters
from llmtrain_trainer.parallel.pieces import Box


class FullySharded:
    """Parameters that FSDP2 keeps sharded; see apply.Weights."""

    def __init__(self, stages: Mapping[int, Transformer], sharing: Sharing) -> None:
        self._roots = [_shard(stage, sharing) for stage in stages.values()]
        for stage in stages.values():
            materialise(stage, sharing.device)
        self._parameters = named_parameters(stages.values())
        self.shards: Mapping[str, Tensor] = {
            name: _local(parameter.detach()) for name, parameter in self._parameters.items()
        }
        self.boxes: Mapping[str, Box] = {name: _box(parameter) for name, parameter in self._parameters.items()}

    def before_backward(self, *, sync: bool, last: bool) -> None:
        """Say whether the next backward reduces gradients."""
        for root in self._roots:
            root.set_requires_gradient_sync(sync)

    def after_backward(self) -> None:
        """Nothing is left to do: FSDP2 reduces on its own."""

    def before_pipeline(self) -> None:
        """Nothing has to be said: the pipeline's schedule tells FSDP2."""

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of every gradient that there is."""
        return {name: _local(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def forget_gradients(self) -> None:
        """Let go of the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def shards_have_changed(self) -> None:
        """Forget the gradients; the shards are where FSDP2 gathers parameters from."""
        self.forget_gradients()


def _shard(model: Transformer, sharing: Sharing) -> FSDPModule:
    """Apply FSDP2 in place (HSDP when a mesh has two dims); return the same model as what it has become.

    Stage 3 frees a block's parameters after forward and gathers them again in backward; stage 2 keeps them whole in
    between. Gradients are summed in fp32, never averaged: the loss is already divided by the global batch's tokens.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_TYPE[sharing.precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the residual stream has the type already, and the rotary tables must stay fp32
    )
    meshes: Meshes = sharing.meshes
    where, frees = meshes.data, sharing.zero_stage == 3
    for block in model.blocks():
        if meshes.experts is not None and isinstance(block.feed_forward, MixtureOfExperts):
            rows = partial(_rows_to_shard, ranks=meshes.experts.shape[-1])
            experts = block.feed_forward.experts
            fully_shard(
                experts, mesh=meshes.experts, reshard_after_forward=frees, mp_policy=policy, shard_placement_fn=rows
            )
    for together in _units(model):
        fully_shard(together, mesh=where, reshard_after_forward=frees, mp_policy=policy)
    # Backward begins with the root's own parameters (the output), so freeing them after forward would only cost.
    root = fully_shard(model, mesh=where, reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return root


def _units(model: Transformer) -> Iterator[list[nn.Module]]:
    """Yield the blocks that are gathered and reduced together: small ones share messages, others have their own."""
    unit: list[nn.Module] = []
    elements = 0
    for block in model.blocks():
        unit.append(block)
        elements += sum(p.numel() for p in block.parameters() if not isinstance(p, DTensor))  # experts are apart
        if elements * FP32 >= BUCKET_BYTES:
            yield unit
            unit, elements = [], 0
    if unit:
        yield unit


def _rows_to_shard(weight: nn.Parameter, ranks: int) -> Shard | None:
    """Shard stacked experts by expert, unless some ranks would get more of them than others: then by their rows."""
    uneven = weight.shape[0] % ranks != 0 and weight.shape[1] % ranks == 0
    return Shard(1) if uneven else None


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; it shares the memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _box(parameter: nn.Parameter) -> Box:
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    copies = mesh.size(0) if mesh.ndim == 2 else 1
    return Box(tuple(parameter.shape), tuple(offsets), tuple(sizes), copies)
