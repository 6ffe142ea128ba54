"""Rules about a mixture of experts and how ranks share it."""

from __future__ import annotations

from llmtrain_api.presets import PRESETS, MoeDimensions
from llmtrain_api.rule import Rule, Scope, Term, cel_string
from llmtrain_api.rules_layout import AXES_READS, COPIES_MISFIT_CEL, SHAPE_READS, SHARDED, TENSOR, copies_fit
from llmtrain_api.rules_model import dimension, known, known_cel

ALIGNMENT = 8
"""Widths of an expert are multiples of this: rows of bf16 that begin at 16 bytes, as grouped matrix products need."""

_PRESET_EXPERTS = {name: size.moe for name, size in PRESETS.items() if size.moe}


def _of_preset(attribute: str) -> Term:
    """What the preset's mixture has; 0 where it has none."""
    table = ", ".join(f"{cel_string(name)}: {getattr(moe, attribute)}" for name, moe in _PRESET_EXPERTS.items())
    preset = "has(self.model.preset) && self.model.preset in"

    def of(s: Scope) -> int:
        moe: MoeDimensions | None = _PRESET_EXPERTS.get(s.now["model"].get("preset", ""))
        return int(getattr(moe, attribute)) if moe else 0

    return Term(f"({preset} {{{table}}} ? {{{table}}}[self.model.preset] : 0)", of)


_PRESETS = _of_preset("experts")
_PRESET_WIDTH = _of_preset("ffn_dim")
_FFN = dimension("ffnDim", "self.model")
_EXPERTS = Term(
    f"(has(self.model.moe) ? self.model.moe.experts : {_PRESETS.cel})",
    lambda s: s.now["model"]["moe"]["experts"] if "moe" in s.now["model"] else _PRESETS.of(s),
)
"""Experts in a layer; 0: the model is dense."""
_WIDTH = Term(
    f"(has(self.model.moe) ? (has(self.model.moe.ffnDim) ? self.model.moe.ffnDim : {_FFN.cel}) : {_PRESET_WIDTH.cel})",
    lambda s: s.now["model"]["moe"].get("ffnDim") or _FFN.of(s) if "moe" in s.now["model"] else _PRESET_WIDTH.of(s),
)
_EXPERT = Term("self.parallelism.expert", lambda s: s.now["parallelism"]["expert"])
_DIM = dimension("dim", "self.model")
_READS = ("model.preset", "model.moe")

_CHOICE_IS_POSSIBLE = Rule(
    at="spec.model.moe",
    field="topK",
    reads=("topK", "experts"),
    cel="self.topK <= self.experts",
    holds=lambda s: s.now["topK"] <= s.now["experts"],
    value=Term("self.topK", lambda s: s.now["topK"]),
    allowed="at most experts, which is {experts}",
    fix="lower topK or have more experts",
    terms={"experts": Term("self.experts", lambda s: s.now["experts"])},
)
_LAYERS = dimension("layers")
_SOME_LAYER_HAS_EXPERTS = Rule(
    at="spec.model",
    field="moe.everyNLayers",
    reads=("preset", "layers", "moe.everyNLayers"),
    cel=f"!has(self.moe) || !{known_cel()} || self.moe.everyNLayers <= {_LAYERS.cel}",
    holds=lambda s: "moe" not in s.now or not known(s) or s.now["moe"]["everyNLayers"] <= _LAYERS.of(s),
    value=Term("self.moe.everyNLayers", lambda s: s.now["moe"]["everyNLayers"]),
    allowed="at most layers, which is {layers}: else no layer has experts",
    fix="lower it, or leave moe out",
    terms={"layers": _LAYERS},
)
_EXPERTS_ARE_SHARED_OUT = Rule(
    at="spec",
    field="parallelism.expert",
    reads=("parallelism.expert", *_READS),
    cel=f"{_EXPERT.cel} < 2 || ({_EXPERTS.cel} > 0 && {_EXPERTS.cel} % {_EXPERT.cel} == 0)",
    holds=lambda s: _EXPERT.of(s) < 2 or (_EXPERTS.of(s) > 0 and _EXPERTS.of(s) % _EXPERT.of(s) == 0),
    value=_EXPERT,
    allowed="a divisor of the model's number of experts, {experts}; 1 for a dense model, which has 0",
    fix="choose one, or change model.moe",
    terms={"experts": _EXPERTS},
)
_EXPERT_AXIS_FITS = Rule(
    at="spec",
    field="parallelism.expert",
    reads=("parallelism.expert", "parallelism.replicate", *AXES_READS, *SHAPE_READS),
    cel=f"{_EXPERT.cel} < 1 || {COPIES_MISFIT_CEL} || {SHARDED.cel} % {_EXPERT.cel} == 0",
    holds=lambda s: _EXPERT.of(s) < 1 or not copies_fit(s) or SHARDED.of(s) % _EXPERT.of(s) == 0,
    value=_EXPERT,
    allowed="a divisor of {sharded}, the ranks that share one copy of the model and its context",
    fix="choose one, or change the other axes or the number of ranks",
    terms={"sharded": SHARDED},
)
_UNALIGNED = f"{_DIM.cel} % {ALIGNMENT} != 0 || {_WIDTH.cel} % ({TENSOR.cel} * {ALIGNMENT}) != 0"
_EXPERTS_ARE_ALIGNED = Rule(
    at="spec",
    field="model.moe",
    reads=(*_READS, "model.dim", "model.ffnDim", "parallelism.tensor"),
    cel=f"{_EXPERTS.cel} == 0 || {TENSOR.cel} < 1 || !{known_cel('self.model')} || !({_UNALIGNED})",
    holds=lambda s: (
        _EXPERTS.of(s) == 0
        or TENSOR.of(s) < 1
        or not known(Scope(s.now["model"]))
        or (_DIM.of(s) % ALIGNMENT == 0 and _WIDTH.of(s) % (TENSOR.of(s) * ALIGNMENT) == 0)
    ),
    value=_WIDTH,
    allowed=f"an inner width of an expert that {ALIGNMENT} x tensor ({{tensor}}) divides, and a dim ({{dim}}) that "
    f"{ALIGNMENT} divides",
    fix="change model.dim, model.moe.ffnDim (without it: model.ffnDim) or parallelism.tensor",
    terms={"tensor": TENSOR, "dim": _DIM},
)

MOE_RULES: tuple[Rule, ...] = (
    _CHOICE_IS_POSSIBLE,
    _SOME_LAYER_HAS_EXPERTS,
    _EXPERTS_ARE_SHARED_OUT,
    _EXPERT_AXIS_FITS,
    _EXPERTS_ARE_ALIGNED,
)
