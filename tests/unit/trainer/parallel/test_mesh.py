from __future__ import annotations

import pytest

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


def test_ranks_that_share_a_sample_lie_innermost() -> None:
    shape = ParallelShape(pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=2)
    assert [shape.data_index(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
