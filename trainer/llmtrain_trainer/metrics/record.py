"""What is known about one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as it is written to metrics.jsonl."""

    run_id: str
    attempt: int
    step: int
    loss: float | None
    """Mean over the tokens of the global batch, nats per token; null where it was not finite."""
    grad_norm: float | None
    """Of the whole gradient, before clipping; null where it was not finite."""
    learning_rate: float
    skipped: str
    """Why the step was not made; empty for one that was."""
    skipped_steps: int
    """Since the beginning."""
    loss_scale: float
    """After this step; 1 but for fp16."""
    tokens: int
    """Seen since the beginning."""
    tokens_per_second: float
    """Over all ranks."""
    mfu: float | None
    """Part of all GPUs' peak that the model's own operations use, 0 to 1; null where no peak is known: on a CPU."""
    step_seconds: float
    """Between the moments at which all ranks had agreed on the step before and on this one."""
    split: dict[str, float]
    """Seconds of rank 0 per part of that time."""
    memory_bytes: int
    """Highest use of rank 0: of the GPU, or resident on a CPU."""
    memory: dict[str, int]
    """Bytes of rank 0. GPU: allocated, reserved and peak of this process, device_used by all; CPU: resident, peak."""
    expert_load: float | None
    """Of the busiest expert of any layer, as a multiple of its even share; null for a dense model."""
    time: float
    """Unix seconds when the step ended."""


def curves(record: StepRecord) -> dict[str, float]:
    """Return what can be drawn over steps, by name; parts are named `whole/part`. What is null is left out."""
    return dict(_flat(asdict(record), {"run_id", "attempt", "step", "skipped", "time"}))


def _flat(values: Mapping[str, object], left_out: set[str]) -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += [(f"{name}/{part}", number) for part, number in _flat(value, set())]
        elif name not in left_out and isinstance(value, int | float):
            found.append((name, float(value)))
    return found
