"""No sample is lost or repeated, whenever a run stops and however many ranks go on with it."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain_trainer.data.loader import BatchPlan
from llmtrain_trainer.data.order import SampleOrder

counts = st.integers(1, 700)
seeds = st.integers(0, 2**63 - 1)


@given(count=counts, seed=seeds, epoch=st.integers(0, 3))
def test_an_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = SampleOrder(count, seed)
    seen = [order.sequence(epoch * count + i) for i in range(count)]
    assert sorted(seen) == list(range(count))


def test_epochs_and_seeds_differ_and_the_order_never_changes_between_releases() -> None:
    first = [SampleOrder(1000, 7).sequence(i) for i in range(1000)]
    second = [SampleOrder(1000, 7).sequence(1000 + i) for i in range(1000)]
    other = [SampleOrder(1000, 8).sequence(i) for i in range(1000)]
    assert first != second and first != other and first != sorted(first)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 20, "two random permutations agree about once"
    assert first[:8] == [743, 190, 758, 120, 313, 174, 339, 366]


def test_neighbours_are_not_kept_together() -> None:
    order = [SampleOrder(4096, 1).sequence(i) for i in range(4096)]
    steps = [abs(a - b) for a, b in itertools.pairwise(order)]
    assert 1200 < sum(steps) / len(steps) < 1530, "a random permutation's mean distance is a third of its size"


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Draw a global batch and attempts: (data ranks, micro-batch, steps before the attempt is stopped)."""
    global_batch = draw(st.sampled_from([8, 12, 24]))
    attempts = []
    for _ in range(draw(st.integers(1, 5))):
        ranks = draw(st.sampled_from([r for r in (1, 2, 3, 4, 8) if global_batch % r == 0]))
        share = global_batch // ranks
        micro = draw(st.sampled_from([m for m in range(1, share + 1) if share % m == 0]))
        attempts.append((ranks, micro, draw(st.integers(0, 4))))
    return global_batch, attempts


@settings(max_examples=60)
@given(life=lives(), count=st.integers(1, 97), seed=seeds)
def test_any_stops_and_any_world_sizes_see_each_sample_once(
    life: tuple[int, list[tuple[int, int, int]]], count: int, seed: int
) -> None:
    global_batch, attempts = life
    order = SampleOrder(count, seed)
    consumed, seen = 0, []
    for data_ranks, micro_batch, steps in attempts:
        plan = BatchPlan(global_batch, micro_batch, data_ranks)
        for _ in range(steps):
            of_step = [
                sample
                for rank in range(data_ranks)
                for number in range(plan.micro_batches)
                for sample in plan.samples(consumed, number, rank)
            ]
            assert sorted(of_step) == list(range(consumed, consumed + global_batch))
            seen += sorted(of_step)
            consumed += global_batch
    assert seen == list(range(consumed))
    for epoch in range(consumed // count):
        in_epoch = [order.sequence(sample) for sample in seen[epoch * count : (epoch + 1) * count]]
        assert sorted(in_epoch) == list(range(count))
