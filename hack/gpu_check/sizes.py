"""How large the checks are: for a GPU, or tiny, so that a CPU runs every one of them in a minute or two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOY = {"dim": 64, "layers": 2, "heads": 4, "kvHeads": 2, "ffnDim": 192, "vocabSize": 320, "sequenceLength": 64}


@dataclass(frozen=True)
class Sizes:
    """Models as in spec.model, with the sequences of a step, which is one micro-batch."""

    tiny: bool
    numerics: dict[str, Any]
    """Model whose losses are compared. A CPU has to train it too."""
    activations: dict[str, Any]
    """Model of which activations take most of the memory."""
    activations_batch: int
    checkpoint: dict[str, Any]
    """Model whose checkpoint takes several steps to write."""
    speed: dict[str, Any]
    speed_batch: int
    steps: int
    """Of each run."""


TINY = Sizes(
    tiny=True,
    numerics=TOY,
    activations={**TOY, "dim": 128, "layers": 8, "ffnDim": 384, "sequenceLength": 512},
    activations_batch=8,
    checkpoint={**TOY, "dim": 256, "layers": 4, "ffnDim": 768},
    speed=TOY,
    speed_batch=2,
    steps=12,
)


def for_gpu(memory_bytes: int) -> Sizes:
    """Return the sizes for a GPU: llama-1b needs 20 bytes per parameter, and its logits as much again."""
    large = memory_bytes >= 60e9
    model = {"preset": "llama-1b", "sequenceLength": 4096}
    if not large:
        model = {"dim": 1024, "layers": 16, "heads": 16, "kvHeads": 8, "ffnDim": 4096, "vocabSize": 32_000}
        model["sequenceLength"] = 2048
    return Sizes(
        tiny=False,
        numerics={**TOY, "dim": 256, "layers": 4, "ffnDim": 768, "sequenceLength": 256},
        activations={**TOY, "dim": 1024, "layers": 16, "heads": 16, "ffnDim": 3072, "sequenceLength": 2048},
        activations_batch=4,
        checkpoint={**TOY, "dim": 1024, "layers": 8, "heads": 16, "ffnDim": 4096, "sequenceLength": 1024},
        speed=model,
        speed_batch=2,
        steps=20,
    )
