"""What a pipeline's schedule costs: micro-batches whose activations wait, and the time in which ranks stand idle.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (arXiv:2104.04473, section 2.2: 1F1B and interleaved); Qi et
al. 2024 (arXiv:2401.10241, table 2: zero bubble; section 6: ZBV, with the memory of 1F1B); DeepSeek-AI 2024
(arXiv:2412.19437, table 2) and the README of DualPipe, whose p is twice the ranks of DualPipeV. Counts of waiting
micro-batches are those of torch's schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain_api.spec import STAGES_PER_RANK, PipelineSchedule


@dataclass(frozen=True)
class StageTimes:
    """Seconds that the slowest rank of a pipeline needs for one micro-batch, all of its stages together."""

    forward: float
    inputs: float
    """Backward as far as other stages wait for it, what is computed again included."""
    weights: float
    """Backward for the weights' own gradients; the schedules that do not split it do it with `inputs`."""

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def waiting(schedule: PipelineSchedule, rank: int, ranks: int, micro_batches: int) -> float:
    """Return how many micro-batches' activations a rank holds at most, as multiples of those of all of its stages."""
    if ranks == 1:
        return 1
    if schedule == "GPipe":
        return micro_batches
    if schedule == "1F1B":
        return min(micro_batches, ranks - rank)
    count = STAGES_PER_RANK[schedule]
    if schedule == "Interleaved1F1B":
        held = (count - 1) * ranks + 2 * (ranks - 1 - rank) + 1
    elif schedule == "ZBV":
        held = 2 * ranks
    else:
        held = 2 * ranks + 1
    return min(micro_batches * count, held) / count


def idle_seconds(schedule: PipelineSchedule, ranks: int, times: StageTimes) -> float:
    """Return the seconds of a step in which the slowest rank waits for others."""
    others = ranks - 1
    if schedule in ("GPipe", "1F1B"):
        return others * times.total
    if schedule == "Interleaved1F1B":
        return others * times.total / STAGES_PER_RANK[schedule]
    if schedule == "ZBV":
        return others * max(0.0, times.forward + times.inputs - 2 * times.weights)
    # (F&B + B - 3W) for each, in stages of which a rank has two; F&B takes as long as both, one after the other.
    chunk_idle = times.forward + 2 * (times.inputs + times.weights) - 3 * times.weights
    return others * max(0.0, chunk_idle) / STAGES_PER_RANK[schedule]
