"""How layers become stages: by time, in order, each exactly once."""

from __future__ import annotations

import itertools

import pytest

from llmtrain_api.presets import PRESETS, ModelDimensions
from llmtrain_api.spec import STAGES_PER_RANK
from llmtrain_api.stages import layers_of_stages, stages_of_rank


def _dims(layers: int, vocab_size: int = 320) -> ModelDimensions:
    return PRESETS["tiny"].model_copy(update={"layers": layers, "vocab_size": vocab_size})


@pytest.mark.parametrize("layers", [2, 3, 7, 8, 33])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_every_layer_is_in_one_stage_and_in_order(layers: int, stages: int) -> None:
    if layers < stages - 1:
        with pytest.raises(ValueError, match="cannot be cut"):
            layers_of_stages(_dims(layers), stages)
        return
    ranges = layers_of_stages(_dims(layers), stages)
    assert len(ranges) == stages
    assert list(itertools.chain(*ranges)) == list(range(layers))
    assert all(len(r) > 0 for r in ranges[:-1])


def _slowest(dims: ModelDimensions, ranges: list[range]) -> float:
    head = dims.output_flops() / dims.layer_flops(0)
    return max(len(r) + (head if number == len(ranges) - 1 else 0) for number, r in enumerate(ranges))


@pytest.mark.parametrize("vocab_size", [320, 5_000, 100_000])
@pytest.mark.parametrize(("layers", "stages"), [(6, 3), (7, 4), (5, 2)])
def test_no_other_cut_is_faster(layers: int, stages: int, vocab_size: int) -> None:
    dims = _dims(layers, vocab_size)
    own = _slowest(dims, layers_of_stages(dims, stages))
    for marks in itertools.combinations(range(1, layers + 1), stages - 1):
        bounds = (0, *marks, layers)
        assert own <= _slowest(dims, [range(a, b) for a, b in itertools.pairwise(bounds)]) + 1e-9


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    assert [len(r) for r in layers_of_stages(PRESETS["llama-1b"], 4)] == [5, 5, 5, 1]
    assert [len(r) for r in layers_of_stages(PRESETS["llama-70b"], 4)] == [21, 20, 20, 19]


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_ranks_share_the_stages(schedule: str) -> None:
    held = [stages_of_rank(schedule, rank, 4) for rank in range(4)]  # type: ignore[arg-type]
    assert sorted(itertools.chain(*held)) == list(range(4 * STAGES_PER_RANK[schedule]))  # type: ignore[index]
    assert 0 in held[0]
    assert (max(map(max, held)) in held[0]) == (schedule in ("ZBV", "DualPipeV"))
