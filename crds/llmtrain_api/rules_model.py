"""Rules about the shape of the model."""

from __future__ import annotations

from llmtrain_api.presets import PRESETS
from llmtrain_api.rule import Rule, Scope, Term, cel_string

BYTE_VOCABULARY = 257
"""256 bytes and the mark between documents."""

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


def known_cel(model: str = "self") -> str:
    return f"(has({model}.preset) || (" + " && ".join(f"has({model}.{name})" for name in _DIMENSIONS) + "))"


def known(s: Scope) -> bool:
    return "preset" in s.now or all(name in s.now for name in _DIMENSIONS)


def dimension(name: str, model: str = "self") -> Term:
    """A dimension of spec.model: what is written, else the preset's. `model` is where CEL finds spec.model."""
    attribute = _DIMENSIONS[name]
    table = ", ".join(f"{cel_string(preset)}: {getattr(size, attribute)}" for preset, size in PRESETS.items())

    def of(s: Scope) -> int:
        written = s.now["model"] if model == "self.model" else s.now
        return int(written[name] if name in written else getattr(PRESETS[written["preset"]], attribute))

    return Term(f"(has({model}.{name}) ? {model}.{name} : {{{table}}}[{model}.preset])", of)


_KNOWN = known_cel()


_DIM, _HEADS, _KV_HEADS = dimension("dim"), dimension("heads"), dimension("kvHeads")

_MODEL_IS_KNOWN = Rule(
    at="spec.model",
    field="",
    reads=("",),
    cel=_KNOWN,
    holds=known,
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
    holds=lambda s: not known(s) or _HEADS.of(s) < 1 or _DIM.of(s) % _HEADS.of(s) == 0,
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
        not known(s) or _HEADS.of(s) < 1 or _DIM.of(s) % _HEADS.of(s) != 0 or _DIM.of(s) // _HEADS.of(s) % 2 == 0
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
    holds=lambda s: not known(s) or _KV_HEADS.of(s) < 1 or _HEADS.of(s) % _KV_HEADS.of(s) == 0,
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

MODEL_RULES: tuple[Rule, ...] = (
    _MODEL_IS_KNOWN,
    _HEADS_DIVIDE_DIM,
    _HEAD_IS_EVEN,
    _KV_HEADS_DIVIDE_HEADS,
    _BYTES_FIT,
)
