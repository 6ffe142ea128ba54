"""Cases of the table about parallel axes that came after tensor and context: see cases.py."""

from __future__ import annotations

from typing import Any

from tests.unit.api.manifests import Case


def _pipeline(ranks: int = 2, **more: Any) -> dict[str, Any]:
    return {"spec.parallelism": {"pipeline": ranks, **more}}


def _experts(expert: int = 1, **moe: Any) -> dict[str, Any]:
    return {"spec.model.moe": {"experts": 8, "ffnDim": 64, **moe}, "spec.parallelism.expert": expert}


FOUR_LAYERS = {"spec.model.layers": 4}

LAYOUT_ACCEPTED = (
    Case("two stages", _pipeline()),
    Case("two stages of tensor pairs", _pipeline(tensor=2)),
    Case("a schedule without a pipeline", {"spec.parallelism": {"pipelineSchedule": "ZBV"}}),
    Case("two stages per rank", {**_pipeline(pipelineSchedule="Interleaved1F1B"), **FOUR_LAYERS}),
    Case("split backward, ZeRO-2", {**_pipeline(pipelineSchedule="DualPipeV", zeroStage=2), **FOUR_LAYERS}),
    Case(
        "split backward, ZeRO-1, recompute full",
        {**_pipeline(pipelineSchedule="ZBV", zeroStage=1, recompute="full"), **FOUR_LAYERS},
    ),
    Case("muon", {"spec.training.optimizer": {"name": "muon", "momentum": 0.9}}),
    Case("compiled layers", {"spec.training.compile": True, "spec.parallelism": {"recompute": "full"}}),
    Case("fp16 and skipped spikes", {"spec.training.precision": "fp16", "spec.training.skipping": {"spikeSigmas": 6}}),
    Case("positions and norms of other weights", {"spec.model.ropeTheta": 5e5, "spec.model.normEpsilon": 1e-6}),
    Case("split backward, nothing sharded", {**_pipeline(pipelineSchedule="ZBV", zeroStage=0), **FOUR_LAYERS}),
    Case("experts as they come", {"spec.model.moe": {}}),
    Case("experts of a preset", {"spec.model.preset": "tiny-moe", "spec.parallelism.expert": 4}),
    Case("experts on pairs of ranks", _experts(2, capacityFactor=1.25, biasRate=0.001, balanceCoefficient=0)),
    Case("one expert of two on each rank", _experts(2, experts=2, topK=2, sharedExperts=1, everyNLayers=2)),
)

LAYOUT_MISTYPED = (
    Case("pipeline 0", _pipeline(0), ("spec.parallelism.pipeline",), ("at least 1",)),
    Case(
        "a schedule that nobody knows",
        _pipeline(pipelineSchedule="2F2B"),
        ("spec.parallelism.pipelineSchedule",),
        ("GPipe", "Interleaved1F1B"),
    ),
    Case("no rotation", {"spec.model.ropeTheta": 0}, ("spec.model.ropeTheta",), ("at least 1",)),
    Case("no epsilon", {"spec.model.normEpsilon": 0}, ("spec.model.normEpsilon",), ("more than 0",)),
    Case("expert 0", {"spec.parallelism.expert": 0}, ("spec.parallelism.expert",), ("at least 1",)),
    Case("one expert", _experts(experts=1, topK=1), ("spec.model.moe.experts",), ("at least 2",)),
    Case("no capacity", _experts(capacityFactor=0), ("spec.model.moe.capacityFactor",), ("more than 0",)),
)

LAYOUT_REFUSED = (
    Case(
        "pipeline that does not divide the ranks",
        _pipeline(3) | {"spec.model.layers": 6},
        ("spec.parallelism.pipeline",),
        ("3 is refused", "4 (workers.replicas 2 x 2 ranks), by tensor x context 1"),
    ),
    Case(
        "more stages than layers",
        _pipeline(4),
        ("spec.parallelism.pipeline",),
        ("4 is refused", "1F1B makes 4 of it", "layers, 2"),
    ),
    Case(
        "more stages than layers, two per rank",
        _pipeline(2, pipelineSchedule="Interleaved1F1B"),
        ("spec.parallelism.pipeline",),
        ("2 is refused", "Interleaved1F1B makes 4 of it"),
    ),
    Case(
        "fewer micro-batches than stages",
        _pipeline(2) | {"spec.training.microBatchSize": 4},
        ("spec.training.microBatchSize",),
        ("4 is refused", "a step as it has stages, 2, or more; now 1"),
    ),
    Case(
        "a broken round",
        _pipeline(2, pipelineSchedule="Interleaved1F1B") | FOUR_LAYERS | {"spec.training.globalBatchSize": 10},
        ("spec.training.globalBatchSize",),
        ("10 is refused", "a multiple of 2 micro-batches", "now 5"),
    ),
    Case(
        "split backward with ZeRO-3",
        _pipeline(2, pipelineSchedule="ZBV") | FOUR_LAYERS,
        ("spec.parallelism.zeroStage",),
        ("3 is refused", "0, 1 or 2 with ZBV"),
    ),
    Case(
        "split backward with selective recomputation",
        _pipeline(2, pipelineSchedule="DualPipeV", zeroStage=2, recompute="selective") | FOUR_LAYERS,
        ("spec.parallelism.recompute",),
        ("selective is refused", "none or full with DualPipeV"),
    ),
    Case(
        "split backward of compiled layers",
        _pipeline(2, pipelineSchedule="ZBV", zeroStage=1) | FOUR_LAYERS | {"spec.training.compile": True},
        ("spec.training.compile",),
        ("true is refused", "false with ZBV"),
    ),
    Case(
        "selective recomputation of compiled layers",
        {"spec.parallelism": {"recompute": "selective"}, "spec.training.compile": True},
        ("spec.parallelism.recompute",),
        ("selective is refused", "none or full with training.compile"),
    ),
    Case(
        "reductions within a pipeline's step",
        _pipeline(2) | {"spec.training.syncEveryMicroBatches": 2},
        ("spec.training.syncEveryMicroBatches",),
        ("2 is refused", "nothing with a pipeline"),
    ),
    Case(
        "replicas of what the pipeline leaves",
        _pipeline(2, replicate=4),
        ("spec.parallelism.replicate",),
        ("4 is refused", "a divisor of 2"),
    ),
    Case("more choices than experts", _experts(topK=9), ("spec.model.moe.topK",), ("9 is refused", "which is 8")),
    Case(
        "experts in no layer",
        _experts(everyNLayers=3),
        ("spec.model.moe.everyNLayers",),
        ("3 is refused", "at most layers, which is 2"),
    ),
    Case(
        "expert axis of a dense model",
        {"spec.parallelism.expert": 2},
        ("spec.parallelism.expert",),
        ("2 is refused", "1 for a dense model"),
    ),
    Case(
        "expert axis that does not divide the experts",
        _experts(4, experts=6),
        ("spec.parallelism.expert",),
        ("4 is refused", "number of experts, 6"),
    ),
    Case(
        "expert axis of more ranks than share a copy",
        _experts(4) | {"spec.parallelism.replicate": 2},
        ("spec.parallelism.expert",),
        ("4 is refused", "a divisor of 2, the ranks"),
    ),
    Case(
        "experts of an odd width",
        _experts(ffnDim=60),
        ("spec.model.moe",),
        ("60 is refused", "8 x tensor (1) divides", "a dim (64)"),
    ),
    Case(
        "experts cut too thin",
        _experts(ffnDim=8) | {"spec.parallelism.tensor": 2},
        ("spec.model.moe",),
        ("8 is refused", "8 x tensor (2) divides"),
    ),
)
