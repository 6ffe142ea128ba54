"""The learning rate, a pure function of the step."""

from __future__ import annotations

import math

from llmtrain_api.spec import Training


def learning_rate(step: int, training: Training) -> float:
    """Return the rate of optimizer step `step` (from 1): linear warm-up, then the named curve.

    Cosine ends at min_learning_rate_ratio of the peak on the last step (Loshchilov and Hutter 2017, without restarts).
    """
    peak, schedule = training.optimizer.learning_rate, training.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    span = max(1, training.steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / span)
    ratio = schedule.min_learning_rate_ratio
    return peak * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * done)))
