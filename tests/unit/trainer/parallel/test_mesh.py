from __future__ import annotations

import pytest

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.errors import UserError
from llmtrain_trainer.parallel.mesh import ParallelShape


@pytest.mark.parametrize(
    ("world_size", "replicate", "axes"),
    [
        (1, 1, {"dp_shard": 1}),
        (4, 1, {"dp_shard": 4}),
        (4, 2, {"dp_replicate": 2, "dp_shard": 2}),
        (4, 4, {"dp_replicate": 4, "dp_shard": 1}),
        (24, 3, {"dp_replicate": 3, "dp_shard": 8}),
    ],
)
def test_what_is_not_replicated_is_sharded(world_size: int, replicate: int, axes: dict[str, int]) -> None:
    shape = ParallelShape.of(world_size, replicate=replicate)
    assert shape.active_axes() == axes
    assert shape.world_size == shape.data_ranks == world_size
    assert [shape.data_index(rank) for rank in range(world_size)] == list(range(world_size))


@pytest.mark.parametrize(("world_size", "replicate"), [(4, 3), (2, 4), (1, 2)])
def test_an_impossible_shape_names_the_divisors(world_size: int, replicate: int) -> None:
    with pytest.raises(UserError, match=r"spec\.parallelism\.replicate: .*; allowed: a divisor of .*; fix: choose"):
        ParallelShape.of(world_size, replicate=replicate)


@pytest.mark.parametrize(
    ("tensor", "replicate", "axes"),
    [
        (2, 1, {"dp_shard": 4, "tp": 2}),
        (4, 2, {"dp_replicate": 2, "dp_shard": 1, "tp": 4}),
        (8, 1, {"dp_shard": 1, "tp": 8}),
    ],
)
def test_the_tensor_axis_takes_its_ranks_first(tensor: int, replicate: int, axes: dict[str, int]) -> None:
    shape = ParallelShape.of(8, replicate=replicate, tensor=tensor)
    assert shape.active_axes() == axes
    assert shape.data_ranks == 8 // tensor
    assert [shape.data_index(rank) for rank in range(8)] == [rank // tensor for rank in range(8)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_heads": 3}, r"model\.kvHeads is 3, .*; allowed: for this model: 1, 3;"),
        ({"vocab_size": 258}, r"model\.vocabSize is 258, .*; allowed: for this model: 1, 2, 3, 6;"),
        ({"sequence_length": 6}, r"model\.sequenceLength is 6, .*; allowed: for this model: 1, 2, 3, 6;"),
    ],
)
def test_a_model_that_cannot_be_cut_is_told_how_it_could(changes: dict[str, int], words: str) -> None:
    dims = ModelDimensions(dim=48, layers=2, heads=12, kv_heads=12, ffn_dim=48, vocab_size=264, sequence_length=24)
    shape = ParallelShape.of(4, tensor=4)
    shape.check(dims)
    with pytest.raises(UserError, match=words):
        shape.check(dims.model_copy(update=changes))


def test_context_cuts_what_tensor_leaves_of_the_sequence() -> None:
    dims = ModelDimensions(dim=48, layers=2, heads=12, kv_heads=12, ffn_dim=48, vocab_size=264, sequence_length=12)
    shape = ParallelShape.of(16, tensor=2, context=2)
    shape.check(dims)
    assert (shape.data_ranks, shape.active_axes()) == (4, {"dp_shard": 4, "cp": 2, "tp": 2})
    with pytest.raises(UserError, match=r"parallelism\.context: 8: .*; allowed: a divisor of 6;"):
        ParallelShape.of(16, tensor=2, context=8).check(dims)


def test_ranks_that_share_a_sample_lie_innermost() -> None:
    shape = ParallelShape(pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=2)
    assert [shape.data_index(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
