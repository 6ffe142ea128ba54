"""Rules about the pipeline: enough layers and micro-batches for its stages, and what its schedules can do."""

from __future__ import annotations

from llmtrain_api.rule import Rule, Scope, Term, cel_string
from llmtrain_api.rules_layout import AXES_READS, BATCH_MISFIT_CEL, MICRO_BATCHES, PIPELINE, SHAPE_READS, batch_fits
from llmtrain_api.rules_model import dimension, known, known_cel
from llmtrain_api.spec import SPLIT_BACKWARD, STAGES_PER_RANK

_SCHEDULE = Term("self.parallelism.pipelineSchedule", lambda s: s.now["parallelism"]["pipelineSchedule"])
_SINGLE = ", ".join(cel_string(name) for name, count in STAGES_PER_RANK.items() if count == 1)
_STAGES = Term(
    f"({PIPELINE.cel} * ({_SCHEDULE.cel} in [{_SINGLE}] ? 1 : 2))",
    lambda s: PIPELINE.of(s) * STAGES_PER_RANK.get(_SCHEDULE.of(s), 2),
)
_LAYERS = dimension("layers", "self.model")
_OFF = f"{PIPELINE.cel} < 2"


def _off(s: Scope) -> bool:
    return bool(PIPELINE.of(s) < 2)


def _splits(s: Scope) -> bool:
    return not _off(s) and _SCHEDULE.of(s) in SPLIT_BACKWARD


_UNSPLIT_CEL = f"{_OFF} || !({_SCHEDULE.cel} in [{', '.join(map(cel_string, SPLIT_BACKWARD))}])"
_READS = ("parallelism.pipeline", "parallelism.pipelineSchedule")

_STAGES_HAVE_LAYERS = Rule(
    at="spec",
    field="parallelism.pipeline",
    reads=(*_READS, "model.preset", "model.layers"),
    cel=f"{_OFF} || !{known_cel('self.model')} || {_STAGES.cel} <= {_LAYERS.cel}",
    holds=lambda s: _off(s) or not known(Scope(s.now["model"])) or _STAGES.of(s) <= _LAYERS.of(s),
    value=PIPELINE,
    allowed="as many stages ({schedule} makes {stages} of it) as the model has layers, {layers}, or fewer",
    fix="choose a smaller pipeline, or a schedule with one stage per rank",
    terms={"schedule": _SCHEDULE, "stages": _STAGES, "layers": _LAYERS},
)
_STAGES_ARE_FED = Rule(
    at="spec",
    field="training.microBatchSize",
    reads=(*_READS, *AXES_READS, *SHAPE_READS, "training.globalBatchSize", "training.microBatchSize"),
    cel=f"{_OFF} || {BATCH_MISFIT_CEL} || {MICRO_BATCHES.cel} >= {_STAGES.cel}",
    holds=lambda s: _off(s) or not batch_fits(s) or MICRO_BATCHES.of(s) >= _STAGES.of(s),
    value=Term("self.training.microBatchSize", lambda s: s.now["training"]["microBatchSize"]),
    allowed="one that gives a pipeline as many micro-batches a step as it has stages, {stages}, or more; now {count}",
    fix="raise training.globalBatchSize, or lower training.microBatchSize or parallelism.pipeline",
    terms={"stages": _STAGES, "count": MICRO_BATCHES},
)
_ROUNDS_ARE_WHOLE = Rule(
    at="spec",
    field="training.globalBatchSize",
    reads=(*_READS, *AXES_READS, *SHAPE_READS, "training.globalBatchSize", "training.microBatchSize"),
    cel=f"{_OFF} || {_SCHEDULE.cel} != 'Interleaved1F1B' || {BATCH_MISFIT_CEL}"
    f" || {MICRO_BATCHES.cel} % {PIPELINE.cel} == 0",
    holds=lambda s: (
        _off(s)
        or _SCHEDULE.of(s) != "Interleaved1F1B"
        or not batch_fits(s)
        or MICRO_BATCHES.of(s) % PIPELINE.of(s) == 0
    ),
    value=Term("self.training.globalBatchSize", lambda s: s.now["training"]["globalBatchSize"]),
    allowed="one that gives each pipeline a multiple of {pipeline} micro-batches with Interleaved1F1B; now {count}",
    fix="change it or training.microBatchSize, or choose another parallelism.pipelineSchedule",
    terms={"pipeline": PIPELINE, "count": MICRO_BATCHES},
)
_WEIGHTS_WAIT = Rule(
    at="spec",
    field="parallelism.zeroStage",
    reads=(*_READS, "parallelism.zeroStage"),
    cel=f"{_UNSPLIT_CEL} || self.parallelism.zeroStage < 3",
    holds=lambda s: not _splits(s) or s.now["parallelism"]["zeroStage"] < 3,
    value=Term("self.parallelism.zeroStage", lambda s: s.now["parallelism"]["zeroStage"]),
    allowed="0, 1 or 2 with {schedule}, which comes back to a layer's weights after its backward pass: they must stay",
    fix="set parallelism.zeroStage to 2, or choose another parallelism.pipelineSchedule",
    terms={"schedule": _SCHEDULE},
)
_LAYERS_ARE_KEPT_ONCE = Rule(
    at="spec",
    field="parallelism.recompute",
    reads=(*_READS, "parallelism.recompute"),
    cel=f"{_UNSPLIT_CEL} || self.parallelism.recompute != 'selective'",
    holds=lambda s: not _splits(s) or s.now["parallelism"]["recompute"] != "selective",
    value=Term("self.parallelism.recompute", lambda s: s.now["parallelism"]["recompute"]),
    allowed="none or full with {schedule}, which walks back through a layer twice: what selective keeps serves once",
    fix="set parallelism.recompute to full, or choose another parallelism.pipelineSchedule",
    terms={"schedule": _SCHEDULE},
)
_COMPILED_WHOLE = Rule(
    at="spec",
    field="training.compile",
    reads=(*_READS, "training.compile"),
    cel=f"{_UNSPLIT_CEL} || !self.training.compile",
    holds=lambda s: not _splits(s) or not s.now["training"]["compile"],
    value=Term("self.training.compile", lambda s: s.now["training"]["compile"]),
    allowed="false with {schedule}, which walks back through a layer in two parts: what is compiled has one",
    fix="leave it out, or choose another parallelism.pipelineSchedule",
    terms={"schedule": _SCHEDULE},
)
_COMPILED_KEEPS_LITTLE = Rule(
    at="spec",
    field="parallelism.recompute",
    reads=("parallelism.recompute", "training.compile"),
    cel="!self.training.compile || self.parallelism.recompute != 'selective'",
    holds=lambda s: not s.now["training"]["compile"] or s.now["parallelism"]["recompute"] != "selective",
    value=Term("self.parallelism.recompute", lambda s: s.now["parallelism"]["recompute"]),
    allowed="none or full with training.compile: a compiled layer decides by itself what is cheap to compute again",
    fix="set parallelism.recompute to none or full, or leave training.compile out",
)
_REDUCED_ONCE = Rule(
    at="spec",
    field="training.syncEveryMicroBatches",
    reads=("parallelism.pipeline", "training.syncEveryMicroBatches"),
    cel=f"{_OFF} || !has(self.training.syncEveryMicroBatches)",
    holds=lambda s: _off(s) or "syncEveryMicroBatches" not in s.now["training"],
    value=Term("self.training.syncEveryMicroBatches", lambda s: s.now["training"]["syncEveryMicroBatches"]),
    allowed="nothing with a pipeline, which reduces gradients once, after the last micro-batch",
    fix="leave it out",
)

PIPELINE_RULES: tuple[Rule, ...] = (
    _STAGES_HAVE_LAYERS,
    _STAGES_ARE_FED,
    _ROUNDS_ARE_WHOLE,
    _WEIGHTS_WAIT,
    _LAYERS_ARE_KEPT_ONCE,
    _COMPILED_WHOLE,
    _COMPILED_KEEPS_LITTLE,
    _REDUCED_ONCE,
)
