"""What may change once a job exists, and the rules that refuse the rest."""

from __future__ import annotations

from llmtrain_api.rule import Rule, Term

MUTABLE = (
    "spec.suspend",
    "spec.workers.replicas",
    "spec.failurePolicy",
    "spec.activeDeadlineSeconds",
    "spec.ttlSecondsAfterFinished",
)
"""What the operator obeys at any time; with all that lies below."""

_OPTIONAL = {
    "spec.workers": ("ranksPerWorker",),
    "spec.parallelism": ("planFor",),
    "spec.model": (
        "preset",
        "dim",
        "layers",
        "heads",
        "kvHeads",
        "ffnDim",
        "vocabSize",
        "sequenceLength",
        "ropeTheta",
        "normEpsilon",
        "initFrom",
    ),
    "spec.data.tokenizer": ("uri",),
    "spec.training": ("syncEveryMicroBatches",),
    "spec.checkpoint": ("everySeconds", "keepEverySteps"),
    "spec.training.optimizer": ("learningRate", "beta2", "weightDecay"),
    "spec.training.skipping": ("spikeSigmas",),
}
"""Fields that may be absent: they have no default."""
_WORDS = {
    "spec": ("managedBy",),
    "spec.workers": ("device", "image"),
    "spec.workers.accelerator": ("resource", "count"),
    "spec.parallelism": (
        "replicate",
        "tensor",
        "context",
        "pipeline",
        "pipelineSchedule",
        "expert",
        "zeroStage",
        "recompute",
    ),
    "spec.data": ("maskDocuments",),
    "spec.training": ("steps", "globalBatchSize", "microBatchSize", "precision", "compile", "seed"),
    "spec.training.optimizer": ("name", "momentum", "beta1", "epsilon", "gradientClipNorm"),
    "spec.training.lossScale": ("initial", "minimum", "growthSteps", "hysteresis"),
    "spec.training.skipping": ("maxInARow",),
    "spec.training.schedule": ("kind", "warmupSteps", "minLearningRateRatio", "decayFraction"),
    "spec.checkpoint": ("store", "secretName", "everySteps", "pace", "keep"),
}
"""Fields whose values are shown in the message."""
_WHOLES = {
    "spec": {"metrics": "self.metrics == oldSelf.metrics"},
    "spec.workers": {"template": "self.template == oldSelf.template"},
    "spec.model": {"moe": "has(self.moe) == has(oldSelf.moe) && (!has(self.moe) || self.moe == oldSelf.moe)"},
    "spec.checkpoint": {
        name: f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"
        for name in ("memory", "disk")
    },
    # To an API server the order in a list that is a map does not count; to the order of the data it does.
    "spec.data": {
        "sources": "self.sources == oldSelf.sources && self.sources.map(s, s.uri) == oldSelf.sources.map(s, s.uri)"
    },
}
"""Fields compared as a whole, with their CEL: too much to show."""


def _rule(at: str, name: str, same: str, now: Term, before: Term) -> Rule:
    return Rule(
        at=at,
        field=name,
        reads=(name,),
        cel=same,
        holds=lambda s: s.now.get(name) == s.before.get(name),
        value=now,
        allowed="{before}, because it cannot change once the job exists",
        fix="put it back, or delete the job and create it anew",
        terms={"before": before},
        transition=True,
    )


def _of_word(at: str, name: str) -> Rule:
    return _rule(
        at,
        name,
        f"self.{name} == oldSelf.{name}",
        Term(f"self.{name}", lambda s: s.now[name]),
        Term(f"oldSelf.{name}", lambda s: s.before[name]),
    )


def _of_optional(at: str, name: str) -> Rule:
    def text(side: str) -> str:
        return f"(has({side}.{name}) ? string({side}.{name}) : 'nothing')"

    return _rule(
        at,
        name,
        f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})",
        Term(text("self"), lambda s: s.now.get(name, "nothing")),
        Term(text("oldSelf"), lambda s: s.before.get(name, "nothing")),
    )


def _of_whole(at: str, name: str) -> Rule:
    return _rule(
        at,
        name,
        _WHOLES[at][name],
        Term("'a change'", lambda s: "a change"),
        Term("'what the job was created with'", lambda s: "what the job was created with"),
    )


IMMUTABLE_RULES: tuple[Rule, ...] = tuple(
    make(at, name)
    for make, table in ((_of_word, _WORDS), (_of_optional, _OPTIONAL), (_of_whole, _WHOLES))
    for at, names in table.items()
    for name in names
)
