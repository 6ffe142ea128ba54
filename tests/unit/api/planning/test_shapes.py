"""Which layouts are tried: all that the resource's rules accept, and no others; and which come first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from llmtrain_api.planning.advice import advice
from llmtrain_api.planning.estimate import estimate
from llmtrain_api.planning.layout import Workload
from llmtrain_api.planning.machine import MACHINES
from llmtrain_api.planning.shapes import AXES, SCHEDULES, legal_axes, plan, smallest
from llmtrain_api.spec import LLMTrainJobSpec, Parallelism
from llmtrain_api.validation import complete, validate
from tests.unit.api.manifests import base, patched


def _job(ranks: int, preset: str = "tiny", **patch: Any) -> dict[str, Any]:
    workers = {"replicas": max(1, ranks // 8), "ranksPerWorker": min(8, ranks), "image": "trainer:1", "device": "auto"}
    changes = {"spec.workers": workers, "spec.model.preset": preset, "spec.training.globalBatchSize": 96, **patch}
    return patched(base(), {name.replace("__", "."): value for name, value in changes.items()})


def _divisions(found: list[Parallelism]) -> set[tuple[object, ...]]:
    return {(*(getattr(axes, axis) for axis in AXES), axes.pipeline_schedule) for axes in found}


@pytest.mark.parametrize(
    ("ranks", "patch"),
    [
        (1, {}),
        (6, {"spec.model.layers": 4}),
        (8, {"spec.model.layers": 8}),
        (6, {"spec.model.layers": 6, "spec.training.globalBatchSize": 18}),
        (8, {"spec.model.preset": "tiny-moe", "spec.model.layers": 4}),
        (6, {"spec.training.syncEveryMicroBatches": 2}),
    ],
    ids=["one rank", "six", "eight", "an odd batch", "experts", "no pipeline with several reductions"],
)
def test_the_divisions_are_those_that_validation_accepts(ranks: int, patch: dict[str, Any]) -> None:
    manifest = _job(ranks, **patch)
    assert validate(manifest) == []
    accepted = set()
    numbers = range(1, ranks + 1)
    for tensor, context, pipeline, replicate, expert in itertools.product(numbers, repeat=5):
        for schedule in SCHEDULES if pipeline > 1 else SCHEDULES[:1]:
            degrees = dict(zip(AXES, (tensor, context, pipeline, replicate, expert), strict=True))
            if ranks % (tensor * context * pipeline * replicate):
                continue  # refused, and validation takes a while
            axes = {**degrees, "pipelineSchedule": schedule, "zeroStage": 1, "recompute": "none"}
            if not validate(patched(manifest, {"spec.parallelism": axes})):
                accepted.add((*degrees.values(), schedule))
    assert _divisions(legal_axes(manifest)) == accepted


def test_what_is_proposed_is_valid_fits_and_is_the_fastest() -> None:
    manifest = _job(16, "llama-8b", **{"spec.training.globalBatchSize": 64})
    machine = MACHINES["h100"]
    found = plan(manifest, machine, top=1000)
    assert found.smallest is None
    assert [one.step_seconds for one in found.best] == sorted(one.step_seconds for one in found.best)
    work = Workload.of(LLMTrainJobSpec.model_validate(complete(manifest)["spec"]))
    for one in found.best:
        assert one.fits
        assert one.memory.total <= machine.memory_bytes
        assert validate(patched(manifest, {"spec.parallelism": one.axes.to_wire()})) == []
        for recompute, stage in itertools.product(("none", "selective", "full"), (1, 2, 3)):
            form = one.axes.model_copy(update={"recompute": recompute, "zero_stage": stage})
            if not validate(patched(manifest, {"spec.parallelism": form.to_wire()})):
                other = estimate(work, form, machine)
                assert not other.fits or other.step_seconds >= one.step_seconds - 1e-9


def test_the_first_of_few_are_the_first_of_all() -> None:
    manifest = _job(32, "llama-8b")
    few, many = (plan(manifest, MACHINES["a100"], top).best for top in (3, 1000))
    assert few == many[:3]


def test_where_nothing_fits_the_advice_helps() -> None:
    manifest = _job(8, "llama-405b", **{"spec.training.globalBatchSize": 128})
    machine = MACHINES["h100"]
    found = plan(manifest, machine, 5)
    assert found.best == []
    assert found.smallest is not None
    assert not found.smallest.fits
    advised = advice(manifest, machine)
    assert "set workers.replicas to 16" in advised
    assert smallest(patched(manifest, {"spec.workers.replicas": 16}), machine).fits


def test_a_thousand_ranks_are_planned() -> None:
    """How long it takes is in docs/tasks/plan.md; here it only has to end."""
    manifest = _job(1024, "llama-405b", **{"spec.training.globalBatchSize": 1024})
    found = plan(manifest, MACHINES["h100"], 10)
    assert len(found.best) == 10
    assert len({tuple(getattr(one.axes, axis) for axis in AXES) for one in found.best}) == 10
