"""Which layers make a pipeline stage, and which stages a rank holds. Pure numbers: no tensors, no ranks that talk.

Stages are cut by estimated time, not by count of layers: the output matrix of a large vocabulary costs as much as
several layers, and a pipeline is as fast as its slowest stage.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import accumulate

from llmtrain_api.presets import ModelDimensions
from llmtrain_api.spec import SPLIT_BACKWARD, STAGES_PER_RANK, PipelineSchedule

V_SHAPED = SPLIT_BACKWARD
"""Schedules in which the stages run down the ranks and up again: the first rank holds the first and the last stage."""


def stages_of_rank(schedule: PipelineSchedule, rank: int, ranks: int) -> list[int]:
    """Return the numbers of the stages that one rank of the pipeline holds, in order."""
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + n * ranks for n in range(STAGES_PER_RANK[schedule])]


def layers_of_stages(dims: ModelDimensions, stages: int) -> list[range]:
    """Return each stage's layers: consecutive, so that the slowest stage is as fast as it can be.

    Every stage but the last has a layer; the last has the output matrix at least. Where several cuts are as good, the
    earlier stages get more layers: they hold more micro-batches' activations, but later ones start later.

    Raises:
        ValueError: there are fewer layers than stages before the last.
    """
    if dims.layers < stages - 1:
        raise ValueError(f"{dims.layers} layers cannot be cut into {stages} stages")
    sums = list(accumulate((dims.layer_flops(layer) for layer in range(dims.layers)), initial=0))

    @cache
    def best(first: int, stages: int) -> tuple[int, tuple[int, ...]]:
        """Return the slowest stage's time and the counts of layers, of `stages` stages that begin at layer `first`."""
        if stages == 1:
            return sums[-1] - sums[first] + dims.output_flops(), (dims.layers - first,)

        def first_stage(count: int) -> int:
            return sums[first + count] - sums[first]

        def rest(count: int) -> int:
            return best(first + count, stages - 1)[0]

        # A longer first stage takes more time and leaves less to the others: the best is where the two lines cross.
        counts = range(1, dims.layers - first - (stages - 2) + 1)
        crossing = bisect_left(counts, True, key=lambda count: first_stage(count) >= rest(count))
        options = counts[max(0, crossing - 1) : crossing + 1]
        count = min(reversed(options), key=lambda count: max(first_stage(count), rest(count)))
        time, others = best(first + count, stages - 1)
        return max(first_stage(count), time), (count, *others)

    counts = best(0, stages)[1]
    starts = [sum(counts[:n]) for n in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
