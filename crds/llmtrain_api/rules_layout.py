"""Rules about how ranks share the work: parallel axes, batch, devices."""

from __future__ import annotations

from llmtrain_api.rule import Rule, Scope, Term
from llmtrain_api.rules_model import dimension, known, known_cel


def _ranks(s: Scope) -> int:
    workers = s.now["workers"]
    return int(workers.get("ranksPerWorker") or max(1, workers["accelerator"]["count"]))


_RANKS = Term(
    "(has(self.workers.ranksPerWorker) ? self.workers.ranksPerWorker"
    " : (self.workers.accelerator.count > 0 ? self.workers.accelerator.count : 1))",
    _ranks,
)
_REPLICAS = Term("self.workers.replicas", lambda s: s.now["workers"]["replicas"])
_WORLD = Term(f"(self.workers.replicas * {_RANKS.cel})", lambda s: _REPLICAS.of(s) * _RANKS.of(s))
_MICRO = Term("self.training.microBatchSize", lambda s: s.now["training"]["microBatchSize"])
TENSOR = Term("self.parallelism.tensor", lambda s: s.now["parallelism"]["tensor"])
_CONTEXT = Term("self.parallelism.context", lambda s: s.now["parallelism"]["context"])
PIPELINE = Term("self.parallelism.pipeline", lambda s: s.now["parallelism"]["pipeline"])
_INNER = Term(f"({TENSOR.cel} * {_CONTEXT.cel})", lambda s: TENSOR.of(s) * _CONTEXT.of(s))
"""Ranks that hold parts of the same sequences."""
_AXES = Term(f"({_INNER.cel} * {PIPELINE.cel})", lambda s: _INNER.of(s) * PIPELINE.of(s))
"""Ranks that work on the same samples."""
_LEFT = Term(f"({_WORLD.cel} / {_AXES.cel})", lambda s: _WORLD.of(s) // _AXES.of(s))
"""Ranks that read different samples."""
_UNIT = Term(f"({_LEFT.cel} * {_MICRO.cel})", lambda s: _LEFT.of(s) * _MICRO.of(s))
_BATCH = Term("self.training.globalBatchSize", lambda s: s.now["training"]["globalBatchSize"])
_NEXT_BATCH = Term(
    f"(({_BATCH.cel} + {_UNIT.cel} - 1) / {_UNIT.cel} * {_UNIT.cel})",
    lambda s: -(-_BATCH.of(s) // _UNIT.of(s)) * _UNIT.of(s),
)
SHAPE_READS = ("workers.replicas", "workers.ranksPerWorker", "workers.accelerator.count")
AXES_READS = ("parallelism.tensor", "parallelism.context", "parallelism.pipeline")


def _inner_fit(s: Scope) -> bool:
    return bool(_INNER.of(s) >= 1 and _WORLD.of(s) % _INNER.of(s) == 0)


def _axes_fit(s: Scope) -> bool:
    return bool(_AXES.of(s) >= 1 and _WORLD.of(s) % _AXES.of(s) == 0)


_AXES_MISFIT = f"{_AXES.cel} < 1 || {_WORLD.cel} % {_AXES.cel} != 0"
_TENSOR_DIVIDES_WORLD = Rule(
    at="spec",
    field="parallelism.tensor",
    reads=("parallelism.tensor", *SHAPE_READS),
    cel=f"{TENSOR.cel} < 1 || {_WORLD.cel} % {TENSOR.cel} == 0",
    holds=lambda s: TENSOR.of(s) < 1 or _WORLD.of(s) % TENSOR.of(s) == 0,
    value=TENSOR,
    allowed="a divisor of the number of ranks, {world} (workers.replicas {replicas} x {ranks} ranks)",
    fix="change parallelism.tensor, workers.replicas or workers.ranksPerWorker",
    terms={"world": _WORLD, "replicas": _REPLICAS, "ranks": _RANKS},
)
_CONTEXT_DIVIDES_WORLD = Rule(
    at="spec",
    field="parallelism.context",
    reads=("parallelism.context", "parallelism.tensor", *SHAPE_READS),
    cel=f"{_CONTEXT.cel} < 1 || {TENSOR.cel} < 1 || {_WORLD.cel} % {TENSOR.cel} != 0"
    f" || {_WORLD.cel} % {_INNER.cel} == 0",
    holds=lambda s: _CONTEXT.of(s) < 1 or TENSOR.of(s) < 1 or _WORLD.of(s) % TENSOR.of(s) != 0 or _inner_fit(s),
    value=_CONTEXT,
    allowed="a divisor of the number of ranks, {world} (workers.replicas {replicas} x {ranks} ranks),"
    " by tensor {tensor}",
    fix="change parallelism.context, workers.replicas or workers.ranksPerWorker",
    terms={"world": _WORLD, "replicas": _REPLICAS, "ranks": _RANKS, "tensor": TENSOR},
)
_PIPELINE_DIVIDES_WORLD = Rule(
    at="spec",
    field="parallelism.pipeline",
    reads=(*AXES_READS, *SHAPE_READS),
    cel=f"{_AXES.cel} < 1 || {_WORLD.cel} % {_INNER.cel} != 0 || {_WORLD.cel} % {_AXES.cel} == 0",
    holds=lambda s: _AXES.of(s) < 1 or not _inner_fit(s) or _axes_fit(s),
    value=PIPELINE,
    allowed="a divisor of the number of ranks, {world} (workers.replicas {replicas} x {ranks} ranks),"
    " by tensor x context {inner}",
    fix="change parallelism.pipeline, workers.replicas or workers.ranksPerWorker",
    terms={"world": _WORLD, "replicas": _REPLICAS, "ranks": _RANKS, "inner": _INNER},
)
_LENGTH = dimension("sequenceLength", "self.model")
_CONTEXT_CUTS_SEQUENCE = Rule(
    at="spec",
    field="parallelism.context",
    reads=("parallelism.context", "parallelism.tensor", "model.preset", "model.sequenceLength"),
    cel=f"{_CONTEXT.cel} < 2 || {TENSOR.cel} < 1 || !{known_cel('self.model')} || {_LENGTH.cel} % {_INNER.cel} == 0",
    holds=lambda s: (
        _CONTEXT.of(s) < 2 or TENSOR.of(s) < 1 or not known(Scope(s.now["model"])) or _LENGTH.of(s) % _INNER.of(s) == 0
    ),
    value=_CONTEXT,
    allowed="a number that times tensor ({tensor}) divides the model's sequenceLength ({length})",
    fix="choose another, or change model.sequenceLength",
    terms={"tensor": TENSOR, "length": _LENGTH},
)
_CUT = {name: dimension(name, "self.model") for name in ("heads", "kvHeads", "ffnDim", "vocabSize", "sequenceLength")}
"""Dimensions that the tensor axis cuts."""


def _tensor_cuts(s: Scope) -> bool:
    if TENSOR.of(s) < 2 or not known(Scope(s.now["model"])):
        return True
    return all(dimension.of(s) % TENSOR.of(s) == 0 for dimension in _CUT.values())


_TENSOR_CUTS_MODEL = Rule(
    at="spec",
    field="parallelism.tensor",
    reads=("parallelism.tensor", "model.preset", *(f"model.{name}" for name in _CUT)),
    cel=f"{TENSOR.cel} < 2 || !{known_cel('self.model')} || ("
    + " && ".join(f"{dimension.cel} % {TENSOR.cel} == 0" for dimension in _CUT.values())
    + ")",
    holds=_tensor_cuts,
    value=TENSOR,
    allowed="a divisor of the model's " + ", ".join(f"{name} ({{{name}}})" for name in _CUT),
    fix="choose a common divisor, or change the model",
    terms=_CUT,
)
_REPLICATE = Term("self.parallelism.replicate", lambda s: s.now["parallelism"]["replicate"])
_REPLICATE_DIVIDES_WORLD = Rule(
    at="spec",
    field="parallelism.replicate",
    reads=("parallelism.replicate", *AXES_READS, *SHAPE_READS),
    cel=f"{_REPLICATE.cel} < 1 || {_AXES_MISFIT} || {_LEFT.cel} % {_REPLICATE.cel} == 0",
    holds=lambda s: _REPLICATE.of(s) < 1 or not _axes_fit(s) or _LEFT.of(s) % _REPLICATE.of(s) == 0,
    value=_REPLICATE,
    allowed="a divisor of {left}: the ranks, {world} (workers.replicas {replicas} x {ranks} ranks),"
    " by tensor x context x pipeline {axes}",
    fix="change parallelism.replicate, workers.replicas or workers.ranksPerWorker",
    terms={"left": _LEFT, "world": _WORLD, "replicas": _REPLICAS, "ranks": _RANKS, "axes": _AXES},
)
_BATCH_IS_SHARED_OUT = Rule(
    at="spec",
    field="training.globalBatchSize",
    reads=(
        "training.globalBatchSize",
        "training.microBatchSize",
        "parallelism.planFor",
        *AXES_READS,
        *SHAPE_READS,
    ),
    # The planner may choose axes that leave fewer ranks to share the batch; where none can, it is the planner who says.
    cel=f"has(self.parallelism.planFor) || {_AXES_MISFIT} || {_UNIT.cel} < 1 || {_BATCH.cel} % {_UNIT.cel} == 0",
    holds=lambda s: (
        "planFor" in s.now["parallelism"] or not _axes_fit(s) or _UNIT.of(s) < 1 or _BATCH.of(s) % _UNIT.of(s) == 0
    ),
    value=_BATCH,
    allowed="a multiple of {unit} (workers.replicas {replicas} x {ranks} ranks / tensor x context x pipeline {axes}"
    " x microBatchSize {micro})",
    fix="use {next}, or change the number of ranks or microBatchSize",
    terms={
        "unit": _UNIT,
        "replicas": _REPLICAS,
        "ranks": _RANKS,
        "axes": _AXES,
        "micro": _MICRO,
        "next": _NEXT_BATCH,
    },
)


MICRO_BATCHES = Term(f"({_BATCH.cel} / {_UNIT.cel})", lambda s: _BATCH.of(s) // _UNIT.of(s))
"""Micro-batches of one rank in one step; means something where `batch_fits`."""
BATCH_MISFIT_CEL = f"{_AXES_MISFIT} || {_UNIT.cel} < 1 || {_BATCH.cel} % {_UNIT.cel} != 0"


SHARDED = Term(
    f"({_LEFT.cel} / {_REPLICATE.cel} * {_CONTEXT.cel})", lambda s: _LEFT.of(s) // _REPLICATE.of(s) * _CONTEXT.of(s)
)
"""Ranks that share one copy of every parameter; means something where `copies_fit`."""
COPIES_MISFIT_CEL = f"{_REPLICATE.cel} < 1 || {_AXES_MISFIT} || {_LEFT.cel} % {_REPLICATE.cel} != 0"


def copies_fit(s: Scope) -> bool:
    """Tell whether the axes and the ranks fit each other, so that the rules above have nothing to say."""
    return bool(_REPLICATE.of(s) >= 1 and _axes_fit(s) and _LEFT.of(s) % _REPLICATE.of(s) == 0)


def batch_fits(s: Scope) -> bool:
    """Tell whether the ranks and the batch fit each other, so that the rules above have nothing to say."""
    return bool(_axes_fit(s) and _UNIT.of(s) >= 1 and _BATCH.of(s) % _UNIT.of(s) == 0)


def _own_ranks(s: Scope) -> int:
    return _ranks(Scope({"workers": s.now}))


_COUNT = Term("self.accelerator.count", lambda s: s.now["accelerator"]["count"])
_CUDA_NEEDS_ONE = Rule(
    at="spec.workers",
    field="accelerator.count",
    reads=("device", "accelerator.count"),
    cel="self.device != 'cuda' || self.accelerator.count > 0",
    holds=lambda s: s.now["device"] != "cuda" or s.now["accelerator"]["count"] > 0,
    value=_COUNT,
    allowed="1 or more, because device is cuda",
    fix="ask for accelerators, or set workers.device to cpu",
)
_RANK_HAS_ITS_OWN = Rule(
    at="spec.workers",
    field="ranksPerWorker",
    reads=("device", "accelerator.count", "ranksPerWorker"),
    cel="self.device != 'cuda' || self.accelerator.count == 0 || !has(self.ranksPerWorker)"
    " || self.ranksPerWorker <= self.accelerator.count",
    holds=lambda s: (
        s.now["device"] != "cuda"
        or s.now["accelerator"]["count"] == 0
        or _own_ranks(s) <= s.now["accelerator"]["count"]
    ),
    value=Term("self.ranksPerWorker", lambda s: s.now["ranksPerWorker"]),
    allowed="at most accelerator.count, which is {count}: each rank computes on an accelerator of its own",
    fix="use {count} or fewer, or ask for more accelerators",
    terms={"count": _COUNT},
)
LAYOUT_RULES: tuple[Rule, ...] = (
    _CUDA_NEEDS_ONE,
    _RANK_HAS_ITS_OWN,
    _TENSOR_DIVIDES_WORLD,
    _TENSOR_CUTS_MODEL,
    _CONTEXT_DIVIDES_WORLD,
    _CONTEXT_CUTS_SEQUENCE,
    _PIPELINE_DIVIDES_WORLD,
    _REPLICATE_DIVIDES_WORLD,
    _BATCH_IS_SHARED_OUT,
)
