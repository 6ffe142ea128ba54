"""Which box of every whole parameter a rank holds: the one description that init, norms and checkpoints share.

Nobody else needs to know how ranks share the model. A layout is legal when the pieces of all ranks cover each
parameter, whatever made them (tensor and expert parallel, FSDP, flat buckets, pipeline stages).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """A parameter is cut along `dim` into `degree` equal parts, of which this rank works with number `index`."""

    axis: Literal["tp", "ep"]
    dim: int
    index: int
    degree: int


Cuts = Mapping[str, tuple[Cut, ...]]
"""By the name of the parameter; along different dims."""


@dataclass(frozen=True)
class Box:
    """What sharding over data ranks left to this one of a parameter, which has `shape` as cuts have left it."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: int
    """Data ranks that hold this same box."""


@dataclass(frozen=True)
class Piece:
    """A box in a whole parameter. One without rows (an uneven shard's last) has a size of 0."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: int = 1
    """Ranks that hold this same piece."""

    def describe(self, local: Tensor) -> Tensor:
        """Return `local` marked as this piece, in the form torch's checkpoints read (CheckpointableTensor)."""
        marked = local.detach()
        boxes = (self.sizes,) if local.numel() else ()
        marked.global_shape = self.shape  # type: ignore[attr-defined]
        marked.global_offsets = (self.offsets,) if boxes else ()  # type: ignore[attr-defined]
        marked.local_offsets = ((0,) * local.ndim,) if boxes else ()  # type: ignore[attr-defined]
        marked.local_sizes = boxes  # type: ignore[attr-defined]
        return marked


def pieces_of(boxes: Mapping[str, Box], cuts: Cuts, tensor_ranks: int) -> dict[str, Piece]:
    """Return the piece of each parameter, by name; `cuts` names those that tensor or expert parallelism has cut."""
    return {name: _piece(box, cuts.get(name, ()), tensor_ranks) for name, box in boxes.items()}


def whole_of(tensor: Tensor) -> Piece:
    """Return the piece of a tensor that ranks hold whole."""
    return Piece(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))


def join_cuts(first: Cuts, second: Cuts) -> dict[str, tuple[Cut, ...]]:
    """Return both tables' cuts of every parameter."""
    return {name: (*first.get(name, ()), *second.get(name, ())) for name in {**first, **second}}


def is_cut(cuts: tuple[Cut, ...], axis: Literal["tp", "ep"]) -> bool:
    """Tell whether one of a parameter's cuts is by that axis: else its ranks hold the parameter whole."""
    return any(cut.axis == axis for cut in cuts)


def _piece(box: Box, cuts: tuple[Cut, ...], tensor_ranks: int) -> Piece:
    """Add up what sharding and what the cuts took."""
    whole, offsets = list(box.shape), list(box.offsets)
    for cut in cuts:
        offsets[cut.dim] += cut.index * box.shape[cut.dim]
        whole[cut.dim] *= cut.degree
    copies = box.copies * (1 if is_cut(cuts, "tp") else tensor_ranks)
    return Piece(tuple(whole), tuple(offsets), box.sizes, copies)


def squared_norm(gradients: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> Tensor:
    """Return this rank's share of the squared global L2 norm, float64: a piece held n times counts 1/n on each."""
    squares = torch.stack(_squares(list(gradients.values())))
    weights = torch.tensor([1.0 / pieces[name].copies for name in gradients], dtype=torch.float64)
    return (squares * weights.to(squares.device)).sum()


def _squares(tensors: list[Tensor]) -> list[Tensor]:
    """Return each tensor's squared norm, float64.

    The CPU's kernel adds a tensor's squares up one after the other in fp32: of four million it loses four digits. Of a
    row it does not.
    """
    if tensors[0].is_cuda:
        return [norm.double().square() for norm in torch._foreach_norm(tensors)]
    return [torch.linalg.vector_norm(tensor, dim=-1).double().square().sum() for tensor in tensors]
