"""Updates of what may not change: a part of the table in cases.py."""

from __future__ import annotations

from typing import Any

from tests.unit.api.manifests import ABSENT, Case


def _frozen(name: str, path: str, value: Any, *words: str, blamed: str = "", **old: Any) -> Case:
    """An update of one field that may not change."""
    before = {key.replace("__", "."): item for key, item in old.items()}
    return Case(f"update of {name}", {**before, path: value}, (blamed or path,), (*words, "cannot change"), old=before)


TEMPLATE = {"spec": {"nodeSelector": {"a": "b"}}}
FROZEN = (
    _frozen(
        "managedBy",
        "spec.managedBy",
        "tests.llmtrain.dev/other",
        "tests.llmtrain.dev/other is refused",
        "allowed: tests.llmtrain.dev/nobody",
    ),
    _frozen("the image", "spec.workers.image", "trainer:2", "trainer:2 is refused; allowed: trainer:1"),
    _frozen("the ranks per worker", "spec.workers.ranksPerWorker", 1, "1 is refused; allowed: 2"),
    _frozen(
        "the ranks per worker, taken away",
        "spec.workers.ranksPerWorker",
        ABSENT,
        "nothing is refused; allowed: 2",
        spec__training__globalBatchSize=16,
    ),
    _frozen(
        "the accelerator",
        "spec.workers.accelerator",
        {"count": 4},
        "4 is refused; allowed: 8",
        blamed="spec.workers.accelerator.count",
    ),
    _frozen("the pod template", "spec.workers.template", TEMPLATE, "a change is refused"),
    _frozen(
        "a key of the pod template",
        "spec.workers.template",
        {"spec": {"tolerations": []}},
        spec__workers__template=TEMPLATE,
    ),
    _frozen(
        "a value in the pod template",
        "spec.workers.template",
        {"spec": {"nodeSelector": {"c": "b"}}},
        spec__workers__template=TEMPLATE,
    ),
    _frozen("the preset", "spec.model.preset", "demo", "demo is refused; allowed: tiny"),
    _frozen("a dimension, added", "spec.model.layers", 3, "3 is refused; allowed: nothing"),
    _frozen(
        "the positions",
        "spec.model.ropeTheta",
        500_000,
        "500000 is refused; allowed: 250000",
        spec__model__ropeTheta=250_000,
    ),
    _frozen("the norms, added", "spec.model.normEpsilon", 0.25, "0.25 is refused; allowed: nothing"),
    _frozen(
        "the first weights, added",
        "spec.model.initFrom",
        "pvc://weights/llama",
        "pvc://weights/llama is refused; allowed: nothing",
    ),
    _frozen("the model's replicas", "spec.parallelism.replicate", 2, "2 is refused; allowed: 1"),
    _frozen("the tensor axis", "spec.parallelism.tensor", 2, "2 is refused; allowed: 1"),
    _frozen("the context axis", "spec.parallelism.context", 2, "2 is refused; allowed: 1"),
    _frozen("the pipeline", "spec.parallelism.pipeline", 2, "2 is refused; allowed: 1"),
    _frozen(
        "the expert axis",
        "spec.parallelism.expert",
        2,
        "2 is refused; allowed: 1",
        spec__model__moe={"experts": 8, "ffnDim": 64},
    ),
    _frozen("the experts, added", "spec.model.moe", {"ffnDim": 64}, "a change is refused"),
    _frozen("planFor, added", "spec.parallelism.planFor", "cpu", "cpu is refused; allowed: nothing"),
    _frozen(
        "planFor, another machine",
        "spec.parallelism.planFor",
        "h200",
        "h200 is refused; allowed: h100",
        spec__parallelism__planFor="h100",
    ),
    _frozen(
        "planFor, taken away",
        "spec.parallelism.planFor",
        ABSENT,
        "nothing is refused; allowed: h100",
        spec__parallelism__planFor="h100",
    ),
    _frozen("the schedule", "spec.parallelism.pipelineSchedule", "GPipe", "GPipe is refused; allowed: 1F1B"),
    _frozen(
        "the loss scale",
        "spec.training.lossScale",
        {"initial": 2},
        "2 is refused; allowed: 65536",
        blamed="spec.training.lossScale.initial",
    ),
    _frozen(
        "the skipping",
        "spec.training.skipping",
        {"maxInARow": 0},
        "0 is refused; allowed: 3",
        blamed="spec.training.skipping.maxInARow",
    ),
    _frozen(
        "the spikes",
        "spec.training.skipping",
        {"spikeSigmas": 6},
        "6 is refused; allowed: nothing",
        blamed="spec.training.skipping.spikeSigmas",
    ),
    _frozen("the reductions", "spec.training.syncEveryMicroBatches", 4, "4 is refused; allowed: nothing"),
    _frozen("what attention sees", "spec.data.maskDocuments", True, "true is refused; allowed: false"),
    _frozen("the compiler", "spec.training.compile", True, "true is refused; allowed: false"),
    _frozen("recomputation", "spec.parallelism.recompute", "full", "full is refused; allowed: none"),
    _frozen("the steps", "spec.training.steps", 40, "40 is refused; allowed: 20"),
    _frozen(
        "the learning rate",
        "spec.training.optimizer",
        {"learningRate": 0.25},
        "0.25 is refused; allowed: nothing",
        blamed="spec.training.optimizer.learningRate",
    ),
    _frozen(
        "the clipping",
        "spec.training.optimizer",
        {"gradientClipNorm": 2},
        "2 is refused; allowed: 1,",
        blamed="spec.training.optimizer.gradientClipNorm",
    ),
    _frozen(
        "the schedule",
        "spec.training.schedule",
        {"kind": "constant"},
        "constant is refused; allowed: cosine",
        blamed="spec.training.schedule.kind",
    ),
    _frozen("the seed", "spec.training.seed", 1, "1 is refused; allowed: 1234"),
    _frozen("the sources", "spec.data.sources", [{"uri": "file:///other"}], "a change is refused"),
    _frozen(
        "the order of the sources",
        "spec.data.sources",
        [{"uri": "file:///b"}, {"uri": "file:///a"}],
        "a change is refused",
        spec__data__sources=[{"uri": "file:///a"}, {"uri": "file:///b"}],
    ),
    _frozen(
        "the tokenizer, added",
        "spec.data.tokenizer",
        {"uri": "file:///t.json"},
        "file:///t.json is refused; allowed: nothing",
        blamed="spec.data.tokenizer.uri",
    ),
    _frozen("the store", "spec.checkpoint.store", "pvc://checkpoints/other", "allowed: pvc://checkpoints/case"),
    _frozen(
        "the credentials of the store",
        "spec.checkpoint.secretName",
        "others",
        "others is refused; allowed: keys",
        spec__checkpoint__store="s3://bucket/x",
        spec__checkpoint__secretName="keys",
    ),
    _frozen("the memory tier, added", "spec.checkpoint.memory", {}, "a change is refused"),
    _frozen("the disk tier", "spec.checkpoint.disk", {"keep": 2}, "a change is refused", spec__checkpoint__disk={}),
    _frozen("the checkpoints kept", "spec.checkpoint.keep", 5, "5 is refused; allowed: 3"),
    _frozen(
        "who is told, added",
        "spec.metrics",
        {"prometheus": {"port": 9400}},
        "a change is refused",
    ),
    _frozen(
        "the place of the event files",
        "spec.metrics",
        {"tensorboard": {"uri": "pvc://boards/b"}},
        "a change is refused",
        spec__metrics={"tensorboard": {"uri": "pvc://boards/a"}},
    ),
    _frozen("the pace", "spec.checkpoint.pace", "auto", "auto is refused; allowed: fixed"),
    _frozen("the seconds", "spec.checkpoint.everySeconds", 60, "60 is refused; allowed: nothing"),
    _frozen("those kept for good", "spec.checkpoint.keepEverySteps", 500, "500 is refused; allowed: nothing"),
)
