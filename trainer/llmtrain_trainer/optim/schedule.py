"""The learning rate, a pure function of the step."""

from __future__ import annotations

import math

from llmtrain_api.spec import Schedule, Training


def learning_rate(step: int, training: Training) -> float:
    """Return the rate of optimizer step `step` (from 1): linear warm-up, then the named curve.

    All but `constant` end at min_learning_rate_ratio of the peak on the last step. Sources: cosine, Loshchilov and
    Hutter 2017, without restarts; wsd, Hu et al. 2024 (MiniCPM, arXiv:2404.06395), with a linear fall.
    """
    peak, schedule = training.optimizer.decided().learning_rate, training.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak  # to the bit
    span = max(1, training.steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / span)
    ratio = schedule.min_learning_rate_ratio
    return peak * (ratio + (1 - ratio) * _height(schedule, done))


def _height(schedule: Schedule, done: float) -> float:
    """Return where the curve stands between its floor, 0, and its peak, 1; `done` runs from 0 to 1."""
    if schedule.kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if schedule.kind == "linear":
        return 1.0 - done
    return min(1.0, (1.0 - done) / schedule.decay_fraction)
