"""Whatever the layout, the numbers are those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Job, merged

pytestmark = pytest.mark.distributed

FP32_LOSS = 3 * 2.0**-21
"""Three spacings of fp32 numbers between 4 and 8, where these losses lie: 1.4e-6, 2.7e-7 of the loss.

The order of a sum's terms is the processor's choice: the same layout was 2.25 spacings off on one machine and 0.5 on
another, each the same whenever it was run again.
"""
FP32_NORM = 1e-5  # relative
BF16_LOSS = 1e-3


def _experts(moe: dict[str, Any] | None = None, **parallelism: int | str) -> dict[str, Any]:
    """Every layer a mixture of four experts, with losses that matter."""
    few = {"experts": 4, "ffnDim": 32, "balanceCoefficient": 0.1, "zCoefficient": 0.01}
    return {"model": {"moe": {**few, **(moe or {})}}, "parallelism": parallelism}


ALONE = ("globalBatchSize", "optimizer")
"""Changes of training that one process has to make too; besides those of the model."""


def _deep(pipeline: int, schedule: str = "1F1B", **parallelism: Any) -> dict[str, Any]:
    """Enough layers and micro-batches for two stages per rank, in up to four ranks."""
    wanted = {"pipeline": pipeline, "pipelineSchedule": schedule, **parallelism}
    if schedule in ("ZBV", "DualPipeV"):
        wanted.setdefault("zeroStage", 2)
    return {"model": {"layers": 8}, "training": {"globalBatchSize": 16}, "parallelism": wanted}


MUON: dict[str, Any] = {"optimizer": {"name": "muon", "learningRate": 1e-3}}
_TENSOR_CONTEXT = {"tensor": 2, "context": 2, "replicate": 2}
BF16_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"tensor": 2}),
    (2, {"context": 2, "recompute": "selective"}),
    (4, {"tensor": 2, "context": 2, "recompute": "full"}),
    (4, {"tensor": 2, "pipeline": 2}),
    (2, {"zeroStage": 0}),
    (4, {"zeroStage": 1, "replicate": 2}),
    (2, {"zeroStage": 1, "tensor": 2, "recompute": "selective"}),
    (4, {"zeroStage": 1, "pipeline": 2, "pipelineSchedule": "Interleaved1F1B"}),
    (4, {"zeroStage": 0, "pipeline": 2, "pipelineSchedule": "GPipe"}),
]
BF16_EXPERT_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"expert": 2}),
    (4, {"expert": 2, "pipeline": 2}),
    (4, {"expert": 2, "zeroStage": 1}),
]
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("2 ranks, ZeRO-3, accumulation", 2, {}),
    ("2 ranks, ZeRO-2", 2, {"parallelism": {"zeroStage": 2}}),
    ("2 ranks, ZeRO-1, accumulation", 2, {"parallelism": {"zeroStage": 1}}),
    ("2 ranks, recompute full", 2, {"parallelism": {"recompute": "full"}}),
    ("2 ranks, recompute selective", 2, {"parallelism": {"recompute": "selective"}}),
    ("2 ranks, tensor 2, recompute full", 2, {"parallelism": {"tensor": 2, "recompute": "full"}}),
    ("2 ranks, tensor 2, recompute selective", 2, {"parallelism": {"tensor": 2, "recompute": "selective"}}),
    ("4 ranks, HSDP 2x2, ZeRO-1", 4, {"parallelism": {"replicate": 2, "zeroStage": 1}}),
    (
        "4 ranks, Lion, shard 2 x tensor 2",
        4,
        {"parallelism": {"tensor": 2}, "training": {"optimizer": {"name": "lion"}}},
    ),
    ("2 ranks, context 2", 2, {"parallelism": {"context": 2}}),
    ("4 ranks, context 4, ZeRO-1", 4, {"parallelism": {"context": 4, "zeroStage": 1}}),
    ("4 ranks, context 2 x tensor 2", 4, {"parallelism": {"context": 2, "tensor": 2}}),
    ("4 ranks, context 2, recompute selective", 4, {"parallelism": {"context": 2, "recompute": "selective"}}),
    ("4 ranks, replicate 2 x context 2", 4, {"parallelism": {"context": 2, "replicate": 2}}),
    ("8 ranks, replicate 2 x shard 2 x tensor 2", 8, {"parallelism": {"replicate": 2, "tensor": 2}}),
    ("8 ranks, shard 2 x context 2 x tensor 2", 8, {"parallelism": {"context": 2, "tensor": 2}}),
    ("8 ranks, replicate 2 x context 2 x tensor 2", 8, {"parallelism": {"replicate": 2, "context": 2, "tensor": 2}}),
    ("4 ranks, tensor 2, accumulation 1", 4, {"parallelism": {"tensor": 2}, "training": {"microBatchSize": 4}}),
    ("2 ranks, tensor 2, accumulation 8, ZeRO-1", 2, {"parallelism": {"tensor": 2, "zeroStage": 1}}),
    ("4 ranks, ZeRO-1, recompute full", 4, {"parallelism": {"zeroStage": 1, "recompute": "full"}}),
    ("4 ranks, ZeRO-2, context 2", 4, {"parallelism": {"zeroStage": 2, "context": 2}}),
    ("2 ranks, Lion, context 2", 2, {"parallelism": {"context": 2}, "training": {"optimizer": {"name": "lion"}}}),
    ("2 ranks, reduced after 3 and 4 of 4", 2, {"training": {"syncEveryMicroBatches": 3}}),
    (
        "2 ranks, reduced each time, ZeRO-1",
        2,
        {"parallelism": {"zeroStage": 1}, "training": {"syncEveryMicroBatches": 1}},
    ),
    (
        "4 ranks, HSDP 2x2, reduced each time",
        4,
        {"parallelism": {"replicate": 2}, "training": {"syncEveryMicroBatches": 1}},
    ),
    ("2 ranks, replicated only", 2, {"parallelism": {"replicate": 2}}),
    ("4 ranks, bigger micro-batch", 4, {"training": {"microBatchSize": 2}}),
    ("4 ranks, HSDP 2x2, ZeRO-3", 4, {"parallelism": {"replicate": 2}}),
    ("4 ranks, HSDP 2x2, ZeRO-2, accumulation", 4, {"parallelism": {"replicate": 2, "zeroStage": 2}}),
    ("2 ranks, tensor 2", 2, {"parallelism": {"tensor": 2}}),
    ("4 ranks, tensor 2, ZeRO-3", 4, {"parallelism": {"tensor": 2}, "training": {"microBatchSize": 2}}),
    ("4 ranks, tensor 2, replicated", 4, {"parallelism": {"tensor": 2, "replicate": 2}}),
    ("3 ranks, nothing divides evenly", 3, {"training": {"globalBatchSize": 12}}),
    ("2 ranks, pipeline 2, GPipe", 2, {"parallelism": {"pipeline": 2, "pipelineSchedule": "GPipe"}}),
    ("4 ranks, pipeline 2 x shard 2, 1F1B, recompute full", 4, {"parallelism": {"pipeline": 2, "recompute": "full"}}),
    ("8 ranks, pipeline 2 x shard 2 x tensor 2", 8, {"parallelism": {"pipeline": 2, "tensor": 2}}),
    ("4 ranks, pipeline 2 x context 2, ZeRO-1", 4, {"parallelism": {"pipeline": 2, "context": 2, "zeroStage": 1}}),
    ("4 ranks, pipeline 2 x replicate 2", 4, {"parallelism": {"pipeline": 2, "replicate": 2, "zeroStage": 2}}),
    ("2 ranks, two stages each, interleaved", 2, _deep(2, "Interleaved1F1B")),
    ("4 ranks, four uneven stages of 7 layers", 4, merged(_deep(4), {"model": {"layers": 7}})),
    ("4 ranks, eight stages, interleaved", 4, _deep(4, "Interleaved1F1B")),
    ("4 ranks, ZBV", 4, _deep(4, "ZBV")),
    ("4 ranks, DualPipeV", 4, _deep(4, "DualPipeV")),
    ("4 ranks, DualPipeV x tensor 2, recompute full", 4, _deep(2, "DualPipeV", tensor=2, recompute="full")),
    ("8 ranks, ZBV x replicate 2 x context 2", 8, _deep(2, "ZBV", replicate=2, context=2)),
    ("3 ranks, muon, uneven shards", 3, {"training": {**MUON, "globalBatchSize": 12}}),
    ("2 ranks, muon, ZeRO-1", 2, {"training": MUON, "parallelism": {"zeroStage": 1}}),
    ("2 ranks, muon, nothing sharded", 2, {"training": MUON, "parallelism": {"zeroStage": 0}}),
    ("8 ranks, muon, tensor 2, context 2, replicate 2", 8, {"training": MUON, "parallelism": _TENSOR_CONTEXT}),
    ("4 ranks, muon, pipeline 2", 4, {"training": MUON, "parallelism": {"pipeline": 2}}),
    ("8 ranks, muon, expert 2, tensor 2", 8, {**_experts(expert=2, tensor=2), "training": MUON}),
    ("1 rank, ZeRO-1", 1, {"parallelism": {"zeroStage": 1}}),
    ("2 ranks, nothing sharded", 2, {"parallelism": {"zeroStage": 0}}),
    ("3 ranks, ZeRO-1, uneven", 3, {"parallelism": {"zeroStage": 1}, "training": {"globalBatchSize": 12}}),
    ("3 ranks, nothing sharded", 3, {"parallelism": {"zeroStage": 0}, "training": {"globalBatchSize": 12}}),
    (
        "2 ranks, ZeRO-1, reduced after 3 and 4 of 4",
        2,
        {"parallelism": {"zeroStage": 1}, "training": {"syncEveryMicroBatches": 3}},
    ),
    (
        "2 ranks, nothing sharded, reduced each time",
        2,
        {"parallelism": {"zeroStage": 0}, "training": {"syncEveryMicroBatches": 1}},
    ),
    (
        "4 ranks, ZeRO-1, replicate 2, reduced after 3 and 4 of 4",
        4,
        {
            "parallelism": {"zeroStage": 1, "replicate": 2},
            "training": {"syncEveryMicroBatches": 3, "globalBatchSize": 16},
        },
    ),
    ("4 ranks, ZeRO-1, tensor 2", 4, {"parallelism": {"zeroStage": 1, "tensor": 2}}),
    ("4 ranks, nothing sharded, tensor 2", 4, {"parallelism": {"zeroStage": 0, "tensor": 2}}),
    ("2 ranks, ZeRO-1, context 2", 2, {"parallelism": {"zeroStage": 1, "context": 2}}),
    (
        "8 ranks, nothing sharded, replicate 2, context 2",
        8,
        {"parallelism": {"zeroStage": 0, "replicate": 2, "context": 2}},
    ),
    ("4 ranks, nothing sharded, pipeline 2", 4, {"parallelism": {"zeroStage": 0, "pipeline": 2}}),
    ("4 ranks, ZeRO-1, ZBV", 4, _deep(2, "ZBV", zeroStage=1)),
    ("4 ranks, nothing sharded, ZBV", 4, _deep(2, "ZBV", zeroStage=0)),
    ("4 ranks, ZeRO-1, DualPipeV, recompute full", 4, _deep(2, "DualPipeV", zeroStage=1, recompute="full")),
    ("4 ranks, ZeRO-1, interleaved", 4, _deep(2, "Interleaved1F1B", zeroStage=1)),
    (
        "2 ranks, ZeRO-1, two buckets",
        2,
        {"model": {"dim": 512, "vocabSize": 8192}, "parallelism": {"zeroStage": 1}, "training": {"microBatchSize": 4}},
    ),
    ("2 ranks, experts, sharded", 2, _experts()),
    ("4 ranks, expert 2, ZeRO-1", 4, _experts(expert=2, zeroStage=1)),
    ("4 ranks, expert 2, nothing sharded, replicate 2", 4, _experts(expert=2, zeroStage=0, replicate=2)),
    ("4 ranks, expert 2 x pipeline 2, ZeRO-1", 4, _experts(expert=2, pipeline=2, zeroStage=1)),
    ("2 ranks, expert 2, accumulation", 2, _experts(expert=2)),
    ("4 ranks, expert 2 x shard 2, recompute full", 4, _experts(expert=2, recompute="full")),
    ("4 ranks, expert 4, recompute selective", 4, _experts(expert=4, recompute="selective")),
    ("8 ranks, expert 2, rows of experts sharded", 8, _experts({"experts": 6, "topK": 3}, expert=2, zeroStage=1)),
    ("2 ranks, experts, tensor 2", 2, _experts({"sharedExperts": 1}, tensor=2)),
    ("4 ranks, expert 2 x tensor 2, capacity", 4, _experts({"capacityFactor": 1.0}, expert=2, tensor=2)),
    ("4 ranks, expert 2 over context 2, capacity", 4, _experts({"capacityFactor": 1.0}, expert=2, context=2)),
    ("4 ranks, expert 2 x replicate 2, bias", 4, _experts({"biasRate": 0.01}, expert=2, replicate=2)),
    ("4 ranks, pipeline 2 x expert 2", 4, _experts({"everyNLayers": 2}, expert=2, pipeline=2)),
    (
        "4 ranks, DualPipeV x expert 2, recompute full",
        4,
        merged(_deep(2, "DualPipeV", recompute="full"), _experts(expert=2)),
    ),
]


Numbers = list[tuple[float, float, float]]


STEPS = 5
UNSAVED: dict[str, Any] = {"training": {"steps": STEPS}, "checkpoint": {"everySteps": 1000}}


def _numbers(job: Job, world_size: int, changes: dict[str, Any]) -> Numbers:
    gang = job.run(world_size, changes=merged(UNSAVED, changes))
    assert gang.wait() == [0] * world_size, gang.output()
    return [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in job.metrics()]


@pytest.mark.timeout(600)
def test_every_layout_gives_the_losses_of_one_process(new_job: Callable[..., Job]) -> None:
    alone: dict[str, list[tuple[float, float, float]]] = {}
    for number, (name, world_size, changes) in enumerate(LAYOUTS):
        same = {"training": {k: v for k, v in changes.get("training", {}).items() if k in ALONE}}
        same["model"] = changes.get("model", {})
        if str(same) not in alone:
            alone[str(same)] = _numbers(new_job(f"alone-{number}"), 1, same)
        expected = alone[str(same)]
        found = _numbers(new_job(f"layout-{number}"), world_size, changes)
        assert len(found) == len(expected) == STEPS, name
        for (loss, norm, rate), (loss_alone, norm_alone, rate_alone) in zip(found, expected, strict=True):
            assert abs(loss - loss_alone) <= FP32_LOSS, name
            assert math.isclose(norm, norm_alone, rel_tol=FP32_NORM), name
            assert rate == rate_alone, name


DOCUMENT_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallelism": {"recompute": "selective"}}),
    (4, {"parallelism": {"tensor": 2, "context": 2}}),
    (4, {"parallelism": {"context": 4, "zeroStage": 1, "recompute": "full"}}),
    (4, {"parallelism": {"pipeline": 2, "context": 2}}),
    (4, {**_experts(expert=2, pipeline=2)}),
    (2, _deep(2, "ZBV")),
]


def test_documents_are_kept_apart_in_every_layout(new_job: Callable[..., Job], short_documents: Path) -> None:
    data = {"sources": [{"uri": f"file://{short_documents}"}]}
    kept_apart = {"data": {**data, "maskDocuments": True}}
    for number, (ranks, changes) in enumerate(DOCUMENT_LAYOUTS):
        same = {name: part for name, part in changes.items() if name != "parallelism"}
        alone = _numbers(new_job(f"alone-{number}"), 1, merged(same, kept_apart))
        shared = _numbers(new_job(f"shared-{number}"), ranks, merged(changes, kept_apart))
        _within(FP32_LOSS, alone, shared, changes)
        joined = _numbers(new_job(f"joined-{number}"), 1, merged(same, {"data": data}))
        assert abs(joined[0][0] - alone[0][0]) > 10 * FP32_LOSS, "documents were not kept apart"


@pytest.mark.timeout(600)
def test_bf16_is_close_to_fp32_in_every_layout(new_job: Callable[..., Job]) -> None:
    four_layers = {"model": {"layers": 4}}  # two stages for each of two ranks
    exact = _numbers(new_job("exact"), 1, four_layers)
    bf16 = {"training": {"precision": "bf16"}, **four_layers}
    alone = _numbers(new_job("alone"), 1, bf16)
    assert [n[0] for n in alone] != [n[0] for n in exact]
    for (loss, *_), (loss_bf16, *_) in zip(exact, alone, strict=True):
        assert abs(loss_bf16 - loss) <= 0.02
    mixture = merged(bf16, {"model": _experts()["model"]})
    for number, (ranks, parallelism) in enumerate(BF16_LAYOUTS):
        shared = _numbers(new_job(f"shared-{number}"), ranks, {**bf16, "parallelism": parallelism})
        _within(BF16_LOSS, alone, shared, parallelism)
    alone = _numbers(new_job("alone-experts"), 1, mixture)
    for number, (ranks, parallelism) in enumerate(BF16_EXPERT_LAYOUTS):
        shared = _numbers(new_job(f"experts-{number}"), ranks, {**mixture, "parallelism": parallelism})
        _within(BF16_LOSS, alone, shared, parallelism)


def _within(tolerance: float, alone: Numbers, shared: Numbers, layout: object) -> None:
    for (loss, *_), (loss_shared, *_) in zip(alone, shared, strict=True):
        assert abs(loss_shared - loss) <= tolerance, layout
