"""What the trainer and its checkpoints tell each other: where training stands, what was saved, what was not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Where training stands: what is saved beside the tensors."""

    step: int = 0
    samples: int = 0
    loss: float = 0.0


@dataclass(frozen=True)
class Committed:
    step: int
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class Failed:
    """A checkpoint that was not made, the same on every rank."""

    step: int
    reason: str
