"""What every way of sharing parameters over data ranks has in common: where, in which type, first values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmtrain_trainer.model.init import fill, standard_deviation
from llmtrain_trainer.model.transformer import Transformer
from llmtrain_trainer.parallel.pieces import Box, Piece

COMPUTE_TYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Meshes:
    """Over which ranks parameters are shared. Of one dim, over which they can be sharded, or of two: copies of that."""

    data: DeviceMesh
    experts: DeviceMesh | None
    """Where expert parallelism leaves fewer ranks for an expert than for the rest; else None."""


@dataclass(frozen=True)
class Sharing:
    """What decides how a rank's parameters are kept."""

    meshes: Meshes
    precision: str
    zero_stage: int
    device: torch.device
    micro_batches: int
    """Of one rank in one step."""
    pipelined: bool


class Weights(Protocol):
    """The parameters of a rank's stages, as data ranks share them."""

    shards: Mapping[str, Tensor]
    """This rank's box of every parameter, fp32, in the order of the model: what the optimizer moves."""
    boxes: Mapping[str, Box]

    def before_backward(self, *, sync: bool, last: bool) -> None:
        """Say whether the next backward's gradients are to be reduced, and whether it is the last of the step."""

    def after_backward(self) -> None:
        """Reduce what is due; the model's next backward may follow."""

    def before_pipeline(self) -> None:
        """Say that all backward passes of the step come next, in an order that the pipeline decides."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the shards, fp32, summed over all data ranks, in the order of the model."""

    def forget_gradients(self) -> None:
        """Let go of the step's gradients."""

    def shards_have_changed(self) -> None:
        """Forget the gradients, and compute from now on with what is in the shards. All ranks call it together."""


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a model that was built on the meta device its memory, with undefined values."""
    model.to_empty(device=device)


def named_parameters(stages: Iterable[Transformer]) -> dict[str, nn.Parameter]:
    """Return the parameters of all stages in order."""
    return {name: parameter for stage in stages for name, parameter in stage.named_parameters()}


@torch.no_grad()
def initialise(shards: Mapping[str, Tensor], pieces: Mapping[str, Piece], *, layers: int, seed: int) -> None:
    """Fill every shard from (seed, name): each rank draws only its own rows, and all layouts start alike."""
    for name, shard in shards.items():
        piece = pieces[name]
        std = standard_deviation(name, layers)
        if std is None:
            shard.fill_(1.0)
        elif shard.numel():
            fill(shard, piece.offsets, piece.shape, name=name, seed=seed, std=std)
