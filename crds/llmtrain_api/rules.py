"""Every rule that a type alone cannot say, declared once. Tested with one table of manifests in Python, in CEL, and by
a real API server.

An API server asks a rule also where a field it reads breaks its own bounds: no rule may divide by zero then.
"""

from __future__ import annotations

from typing import Any

from llmtrain_api.constants import MAX_NAME_LENGTH
from llmtrain_api.immutability import IMMUTABLE_RULES
from llmtrain_api.presets import PRESETS
from llmtrain_api.rule import Rule, Scope, Term, cel_string

BYTE_VOCABULARY = 257
"""256 bytes and the mark between documents."""
RESERVED_ENV_PREFIX = "LLMTRAIN_"

# --- names and addresses ---------------------------------------------------------------------------------------------

_NAME = Rule(
    at="",
    field="metadata.name",
    reads=("metadata.name",),
    cel=f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && !self.metadata.name.contains('.')",
    holds=lambda s: len(s.now["metadata"]["name"]) <= MAX_NAME_LENGTH and "." not in s.now["metadata"]["name"],
    value=Term("self.metadata.name", lambda s: s.now["metadata"]["name"]),
    allowed=f"at most {MAX_NAME_LENGTH} characters and no dot, because pods and host names are made from it",
    fix="choose a shorter name of a-z, 0-9 and '-'",
)


def _stays_in_its_folder(at: str) -> Rule:
    return Rule(
        at=at,
        field="",
        reads=("",),
        cel=r"!self.matches('(^|/)[.][.](/|$)')",
        holds=lambda s: ".." not in s.now.split("/"),
        value=Term("self", lambda s: s.now),
        allowed="a path without '..'",
        fix="write the path in full",
    )


# --- the shape of the model ------------------------------------------------------------------------------------------

_DIMENSIONS = {
    "dim": "dim",
    "layers": "layers",
    "heads": "heads",
    "kvHeads": "kv_heads",
    "ffnDim": "ffn_dim",
    "vocabSize": "vocab_size",
    "sequenceLength": "sequence_length",
}
"""Name in a manifest to name in a preset."""


def _known_cel(model: str = "self") -> str:
    return f"(has({model}.preset) || (" + " && ".join(f"has({model}.{name})" for name in _DIMENSIONS) + "))"


def _known(s: Scope) -> bool:
    return "preset" in s.now or all(name in s.now for name in _DIMENSIONS)


def _dimension(name: str, model: str = "self") -> Term:
    """A dimension of spec.model: what is written, else the preset's. `model` is where CEL finds spec.model."""
    attribute = _DIMENSIONS[name]
    table = ", ".join(f"{cel_string(preset)}: {getattr(size, attribute)}" for preset, size in PRESETS.items())

    def of(s: Scope) -> int:
        written = s.now["model"] if model == "self.model" else s.now
        return int(written[name] if name in written else getattr(PRESETS[written["preset"]], attribute))

    return Term(f"(has({model}.{name}) ? {model}.{name} : {{{table}}}[{model}.preset])", of)


_KNOWN = _known_cel()


_DIM, _HEADS, _KV_HEADS = _dimension("dim"), _dimension("heads"), _dimension("kvHeads")

_MODEL_IS_KNOWN = Rule(
    at="spec.model",
    field="",
    reads=("",),
    cel=_KNOWN,
    holds=_known,
    value=Term(
        "'a model without preset and without'"
        + "".join(f" + (has(self.{name}) ? '' : {cel_string(' ' + name)})" for name in _DIMENSIONS),
        lambda s: "a model without preset and without " + " ".join(n for n in _DIMENSIONS if n not in s.now),
    ),
    allowed=f"preset ({', '.join(PRESETS)}), or all of {', '.join(_DIMENSIONS)}",
    fix="add preset, or the dimensions that are missing",
)
_HEADS_DIVIDE_DIM = Rule(
    at="spec.model",
    field="heads",
    reads=("preset", "dim", "heads"),
    cel=f"!{_KNOWN} || {_HEADS.cel} < 1 || {_DIM.cel} % {_HEADS.cel} == 0",
    holds=lambda s: not _known(s) or _HEADS.of(s) < 1 or _DIM.of(s) % _HEADS.of(s) == 0,
    value=_HEADS,
    allowed="a divisor of dim, which is {dim}",
    fix="change heads or dim",
    terms={"dim": _DIM},
)
_HEAD_IS_EVEN = Rule(
    at="spec.model",
    field="heads",
    reads=("preset", "dim", "heads"),
    cel=f"!{_KNOWN} || {_HEADS.cel} < 1 || {_DIM.cel} % {_HEADS.cel} != 0 || {_DIM.cel} / {_HEADS.cel} % 2 == 0",
    holds=lambda s: (
        not _known(s) or _HEADS.of(s) < 1 or _DIM.of(s) % _HEADS.of(s) != 0 or _DIM.of(s) // _HEADS.of(s) % 2 == 0
    ),
    value=_HEADS,
    allowed="a number of heads whose width is even, because rotary positions turn pairs; dim {dim} makes it {width}",
    fix="change heads or dim",
    terms={"dim": _DIM, "width": Term(f"{_DIM.cel} / {_HEADS.cel}", lambda s: _DIM.of(s) // _HEADS.of(s))},
)
_KV_HEADS_DIVIDE_HEADS = Rule(
    at="spec.model",
    field="kvHeads",
    reads=("preset", "heads", "kvHeads"),
    cel=f"!{_KNOWN} || {_KV_HEADS.cel} < 1 || {_HEADS.cel} % {_KV_HEADS.cel} == 0",
    holds=lambda s: not _known(s) or _KV_HEADS.of(s) < 1 or _HEADS.of(s) % _KV_HEADS.of(s) == 0,
    value=_KV_HEADS,
    allowed="a divisor of heads, which is {heads}",
    fix="change kvHeads or heads",
    terms={"heads": _HEADS},
)
_BYTES_FIT = Rule(
    at="spec",
    field="model.vocabSize",
    reads=("model.vocabSize", "data.tokenizer.uri"),
    cel=f"has(self.data.tokenizer.uri) || !has(self.model.vocabSize) || self.model.vocabSize >= {BYTE_VOCABULARY}",
    holds=lambda s: "uri" in s.now["data"]["tokenizer"] or s.now["model"].get("vocabSize", 1 << 31) >= BYTE_VOCABULARY,
    value=Term("self.model.vocabSize", lambda s: s.now["model"]["vocabSize"]),
    allowed=f"{BYTE_VOCABULARY} or more, because text is read as bytes where data.tokenizer.uri is not given",
    fix=f"use {BYTE_VOCABULARY} or more, or name a tokenizer",
)

# --- the shape of the job --------------------------------------------------------------------------------------------


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
_TENSOR = Term("self.parallelism.tensor", lambda s: s.now["parallelism"]["tensor"])
_CONTEXT = Term("self.parallelism.context", lambda s: s.now["parallelism"]["context"])
_AXES = Term(f"({_TENSOR.cel} * {_CONTEXT.cel})", lambda s: _TENSOR.of(s) * _CONTEXT.of(s))
"""Ranks that work on the same samples."""
_LEFT = Term(f"({_WORLD.cel} / {_AXES.cel})", lambda s: _WORLD.of(s) // _AXES.of(s))
"""Ranks that read different samples."""
_UNIT = Term(f"({_LEFT.cel} * {_MICRO.cel})", lambda s: _LEFT.of(s) * _MICRO.of(s))
_BATCH = Term("self.training.globalBatchSize", lambda s: s.now["training"]["globalBatchSize"])
_NEXT_BATCH = Term(
    f"(({_BATCH.cel} + {_UNIT.cel} - 1) / {_UNIT.cel} * {_UNIT.cel})",
    lambda s: -(-_BATCH.of(s) // _UNIT.of(s)) * _UNIT.of(s),
)
_SHAPE_READS = ("workers.replicas", "workers.ranksPerWorker", "workers.accelerator.count")


def _axes_fit(s: Scope) -> bool:
    return bool(_AXES.of(s) >= 1 and _WORLD.of(s) % _AXES.of(s) == 0)


_AXES_MISFIT = f"{_AXES.cel} < 1 || {_WORLD.cel} % {_AXES.cel} != 0"
_TENSOR_DIVIDES_WORLD = Rule(
    at="spec",
    field="parallelism.tensor",
    reads=("parallelism.tensor", *_SHAPE_READS),
    cel=f"{_TENSOR.cel} < 1 || {_WORLD.cel} % {_TENSOR.cel} == 0",
    holds=lambda s: _TENSOR.of(s) < 1 or _WORLD.of(s) % _TENSOR.of(s) == 0,
    value=_TENSOR,
    allowed="a divisor of the number of ranks, {world} (workers.replicas {replicas} x {ranks} ranks)",
    fix="change parallelism.tensor, workers.replicas or workers.ranksPerWorker",
    terms={"world": _WORLD, "replicas": _REPLICAS, "ranks": _RANKS},
)
_CONTEXT_DIVIDES_WORLD = Rule(
    at="spec",
    field="parallelism.context",
    reads=("parallelism.context", "parallelism.tensor", *_SHAPE_READS),
    cel=f"{_CONTEXT.cel} < 1 || {_TENSOR.cel} < 1 || {_WORLD.cel} % {_TENSOR.cel} != 0"
    f" || {_WORLD.cel} % {_AXES.cel} == 0",
    holds=lambda s: (
        _CONTEXT.of(s) < 1 or _TENSOR.of(s) < 1 or _WORLD.of(s) % _TENSOR.of(s) != 0 or _WORLD.of(s) % _AXES.of(s) == 0
    ),
    value=_CONTEXT,
    allowed="a divisor of the number of ranks, {world} (workers.replicas {replicas} x {ranks} ranks),"
    " by tensor {tensor}",
    fix="change parallelism.context, workers.replicas or workers.ranksPerWorker",
    terms={"world": _WORLD, "replicas": _REPLICAS, "ranks": _RANKS, "tensor": _TENSOR},
)
_LENGTH = _dimension("sequenceLength", "self.model")
_CONTEXT_CUTS_SEQUENCE = Rule(
    at="spec",
    field="parallelism.context",
    reads=("parallelism.context", "parallelism.tensor", "model.preset", "model.sequenceLength"),
    cel=f"{_CONTEXT.cel} < 2 || {_TENSOR.cel} < 1 || !{_known_cel('self.model')} || {_LENGTH.cel} % {_AXES.cel} == 0",
    holds=lambda s: (
        _CONTEXT.of(s) < 2 or _TENSOR.of(s) < 1 or not _known(Scope(s.now["model"])) or _LENGTH.of(s) % _AXES.of(s) == 0
    ),
    value=_CONTEXT,
    allowed="a number that times tensor ({tensor}) divides the model's sequenceLength ({length})",
    fix="choose another, or change model.sequenceLength",
    terms={"tensor": _TENSOR, "length": _LENGTH},
)
_CUT = {name: _dimension(name, "self.model") for name in ("heads", "kvHeads", "ffnDim", "vocabSize", "sequenceLength")}
"""Dimensions that the tensor axis cuts."""


def _tensor_cuts(s: Scope) -> bool:
    if _TENSOR.of(s) < 2 or not _known(Scope(s.now["model"])):
        return True
    return all(dimension.of(s) % _TENSOR.of(s) == 0 for dimension in _CUT.values())


_TENSOR_CUTS_MODEL = Rule(
    at="spec",
    field="parallelism.tensor",
    reads=("parallelism.tensor", "model.preset", *(f"model.{name}" for name in _CUT)),
    cel=f"{_TENSOR.cel} < 2 || !{_known_cel('self.model')} || ("
    + " && ".join(f"{dimension.cel} % {_TENSOR.cel} == 0" for dimension in _CUT.values())
    + ")",
    holds=_tensor_cuts,
    value=_TENSOR,
    allowed="a divisor of the model's " + ", ".join(f"{name} ({{{name}}})" for name in _CUT),
    fix="choose a common divisor, or change the model",
    terms=_CUT,
)
_REPLICATE = Term("self.parallelism.replicate", lambda s: s.now["parallelism"]["replicate"])
_REPLICATE_DIVIDES_WORLD = Rule(
    at="spec",
    field="parallelism.replicate",
    reads=("parallelism.replicate", "parallelism.tensor", "parallelism.context", *_SHAPE_READS),
    cel=f"{_REPLICATE.cel} < 1 || {_AXES_MISFIT} || {_LEFT.cel} % {_REPLICATE.cel} == 0",
    holds=lambda s: _REPLICATE.of(s) < 1 or not _axes_fit(s) or _LEFT.of(s) % _REPLICATE.of(s) == 0,
    value=_REPLICATE,
    allowed="a divisor of {left}: the ranks, {world} (workers.replicas {replicas} x {ranks} ranks),"
    " by tensor x context {axes}",
    fix="change parallelism.replicate, workers.replicas or workers.ranksPerWorker",
    terms={"left": _LEFT, "world": _WORLD, "replicas": _REPLICAS, "ranks": _RANKS, "axes": _AXES},
)
_BATCH_IS_SHARED_OUT = Rule(
    at="spec",
    field="training.globalBatchSize",
    reads=(
        "training.globalBatchSize",
        "training.microBatchSize",
        "parallelism.tensor",
        "parallelism.context",
        *_SHAPE_READS,
    ),
    cel=f"{_AXES_MISFIT} || {_UNIT.cel} < 1 || {_BATCH.cel} % {_UNIT.cel} == 0",
    holds=lambda s: not _axes_fit(s) or _UNIT.of(s) < 1 or _BATCH.of(s) % _UNIT.of(s) == 0,
    value=_BATCH,
    allowed="a multiple of {unit} (workers.replicas {replicas} x {ranks} ranks / tensor x context {axes}"
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
_WARMUP_ENDS = Rule(
    at="spec.training",
    field="schedule.warmupSteps",
    reads=("schedule.warmupSteps", "steps"),
    cel="self.schedule.warmupSteps < self.steps",
    holds=lambda s: s.now["schedule"]["warmupSteps"] < s.now["steps"],
    value=Term("self.schedule.warmupSteps", lambda s: s.now["schedule"]["warmupSteps"]),
    allowed="fewer than training.steps, which is {steps}",
    fix="shorten the warm-up or train longer",
    terms={"steps": Term("self.steps", lambda s: s.now["steps"])},
)

# --- the pod template ------------------------------------------------------------------------------------------------


def _reserved_names(spec: Any) -> list[str]:
    """Environment variables of ours that a template sets; content of the wrong shape is none of our business."""
    found = []
    for group in ("containers", "initContainers"):
        for container in spec.get(group) if isinstance(spec.get(group), list) else ():
            entries = container.get("env") if isinstance(container, dict) else None
            for entry in entries if isinstance(entries, list) else ():
                name = entry.get("name") if isinstance(entry, dict) else None
                if isinstance(name, str) and name.startswith(RESERVED_ENV_PREFIX):
                    found.append(name)
    return found


_ENVIRONMENT_IS_OURS = Rule(
    at="spec.workers.template.spec",
    field="",
    reads=("",),
    cel=None,
    holds=lambda s: not _reserved_names(s.now),
    value=Term("", lambda s: "env " + ", ".join(_reserved_names(s.now))),
    allowed=f"environment variables that do not begin with {RESERVED_ENV_PREFIX}, which the operator sets",
    fix="choose another name",
)

RULES: tuple[Rule, ...] = (
    _NAME,
    _MODEL_IS_KNOWN,
    _HEADS_DIVIDE_DIM,
    _HEAD_IS_EVEN,
    _KV_HEADS_DIVIDE_HEADS,
    _BYTES_FIT,
    _CUDA_NEEDS_ONE,
    _RANK_HAS_ITS_OWN,
    _TENSOR_DIVIDES_WORLD,
    _TENSOR_CUTS_MODEL,
    _CONTEXT_DIVIDES_WORLD,
    _CONTEXT_CUTS_SEQUENCE,
    _REPLICATE_DIVIDES_WORLD,
    _BATCH_IS_SHARED_OUT,
    _WARMUP_ENDS,
    _stays_in_its_folder("spec.checkpoint.store"),
    _stays_in_its_folder("spec.model.initFrom"),
    _stays_in_its_folder("spec.data.sources[].uri"),
    _stays_in_its_folder("spec.data.tokenizer.uri"),
    _ENVIRONMENT_IS_OURS,
    *IMMUTABLE_RULES,
)
"""All of them, in the order in which they are reported."""
