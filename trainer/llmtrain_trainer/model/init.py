"""The first values of every parameter: a pure function of (seed, name, row), so that every layout starts alike."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

ROWS_PER_DRAW = 256
"""Rows drawn from one generator. A rank draws only the blocks that its shard touches."""
BASE_STD = 0.02


def standard_deviation(name: str, layers: int) -> float | None:
    """Return the spread of a parameter's first values, or None for a norm's scale, which starts at one.

    What writes into the residual stream is scaled by 1/sqrt(2 * layers) (Radford et al. 2019, GPT-2).
    """
    module = name.rsplit(".", 2)[-2]
    if module.endswith("norm"):
        return None
    return BASE_STD / math.sqrt(2 * layers) if module in ("wo", "down") else BASE_STD


def fill(part: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], *, name: str, seed: int, std: float) -> None:
    """Fill `part`, the box that begins at `offsets` of a whole parameter of that shape, in place.

    Drawn on the CPU in fp32, whatever the device, so that a GPU and a CPU start from the same model. A stack of
    matrices, [X, rows, columns], is drawn matrix by matrix.
    """
    if part.ndim == 3:
        for number, matrix in enumerate(part, offsets[0]):
            fill(matrix, offsets[1:], shape[1:], name=f"{name}/{number}", seed=seed, std=std)
        return
    first, end = offsets[0], offsets[0] + part.shape[0]
    rest = tuple(slice(o, o + n) for o, n in zip(offsets[1:], part.shape[1:], strict=True))
    for block in range(first // ROWS_PER_DRAW, -(-end // ROWS_PER_DRAW)):
        start = block * ROWS_PER_DRAW
        generator = torch.Generator().manual_seed(_seed_of(seed, name, block))
        drawn = torch.empty(ROWS_PER_DRAW, *shape[1:]).normal_(0.0, std, generator=generator)
        low, high = max(start, first), min(start + ROWS_PER_DRAW, end)
        part[low - first : high - first].copy_(drawn[(slice(low - start, high - start), *rest)])


def _seed_of(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
