"""config.json in both directions: what transformers must be told of our model, and what of theirs must equal ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.checkpoint.huggingface.families import FAMILIES, Family
from llmtrain_trainer.errors import UserError

NAME = "config.json"
UNSCALED = (None, "default")
"""Kinds of rotary positions that are ours: no stretching."""

Wrong = Callable[..., UserError]
"""Makes the error to raise of a folder: wrong(problem, allowed=..., fix=...)."""
FOLDER = "a folder that transformers' save_pretrained wrote"


@dataclass(frozen=True)
class Difference:
    """One thing that config.json says and our model does not do."""

    problem: str
    allowed: str
    fix: str


def write(family: Family, dims: ModelDimensions, dtype: str) -> dict[str, Any]:
    """Return the content of config.json for our model of these dimensions; `dtype` as torch spells it: float32."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: attrgetter(ours)(dims) for key, ours in family.dimensions.items()},
        **family.fixed,
        **({family.window: None} if family.window else {}),
        **_balance(dims),
        "max_position_embeddings": dims.sequence_length,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": None,  # a family's own defaults are marks of its tokenizer, not of the one we trained with
        "eos_token_id": None,
    }


def _balance(dims: ModelDimensions) -> dict[str, float]:
    """Return the weight with which their balance loss pulls a router as hard as ours has done.

    Ours adds layers up, over shares of the load that sum to 1; theirs takes the mean of layers, over shares that sum to
    the experts of a token (load_balancing_loss_func in modeling_mixtral.py).
    """
    if dims.moe is None:
        return {}
    return {"router_aux_loss_coef": dims.moe.balance_coefficient * dims.layers / dims.moe.top_k}


def read(folder: Path, wrong: Wrong) -> dict[str, Any]:
    """Return config.json with the settings of rotary positions at the top, where files before transformers 5 have them.

    Raises:
        UserError: it is not there, not readable, or no JSON object.
    """
    content = read_object(folder / NAME, wrong)
    rotary = content.get("rope_parameters")
    return {**content, **rotary} if isinstance(rotary, dict) else content


def read_object(path: Path, wrong: Wrong) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        UserError: it is not there, not readable, or no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise wrong(f"there is no {path}", allowed=FOLDER, fix="copy it there, or correct the address") from None
    except (OSError, ValueError) as error:
        raise wrong(f"{path} cannot be read: {error}", allowed=FOLDER, fix="copy it there anew") from error
    if not isinstance(content, dict):
        raise wrong(f"{path} is no JSON object", allowed=FOLDER, fix="copy it there anew")
    return content


def differences(config: Mapping[str, Any], family: Family, dims: ModelDimensions) -> Iterator[Difference]:
    """Yield what our model of these dimensions would compute differently, the most telling first."""
    kind = config.get("model_type")
    if kind != family.model_type:
        change = f"{FAMILIES[kind].how}, or " if isinstance(kind, str) and kind in FAMILIES else ""
        fix = f"{change}choose weights of that family"
        yield Difference(f"model_type is {kind!r}", f"{family.model_type!r}, which this job's model is", fix)
        return
    for key, ours in family.dimensions.items():
        found, wanted = _value(config, family, key), attrgetter(ours)(dims)
        if found != wanted:
            fix = _fix(ours, found)
            yield Difference(f"{key} is {found!r} and this job's model has {wanted!r}", f"{key} {wanted!r}", fix)
    for key, wanted in family.fixed.items():
        found = _value(config, family, key)
        if found != wanted:
            yield Difference(f"{key} is {found!r}", f"{key} {wanted!r} alone", "choose other weights")
    yield from _odd_rotary(config)
    yield from _short_window(config, family, dims)
    if config.get("quantization_config"):
        fix = "save them dequantized, in float32 or bfloat16"
        yield Difference("quantization_config: the weights are quantized", "weights that are not quantized", fix)


def _value(config: Mapping[str, Any], family: Family, key: str) -> Any:
    """Return what transformers would take for a key. Two of them follow from others where they are null."""
    found = config[key] if key in config else family.defaults.get(key)
    if found is None and key == "num_key_value_heads":
        return config.get("num_attention_heads")
    if found is None and key == "head_dim":
        dim, heads = config.get("hidden_size"), config.get("num_attention_heads")
        return dim // heads if isinstance(dim, int) and isinstance(heads, int) and heads else None
    return family.defaults.get(key) if found is None else found


def _fix(ours: str, found: Any) -> str:
    if found is None:
        return "complete config.json, or choose other weights"
    if ours == "moe.top_k" and found == 1:
        return "choose weights made with 2 experts or more per token: of one alone our router weighs in its chance"
    if ours == "head_dim":
        return "choose weights whose heads are hidden_size / num_attention_heads wide"
    field = ".".join(map(to_camel, ours.split(".")))
    return f"set model.{field} to {found!r}, or choose other weights"


def _short_window(config: Mapping[str, Any], family: Family, dims: ModelDimensions) -> Iterator[Difference]:
    found = config.get(family.window) if family.window else None
    if found is None or (isinstance(found, int) and found >= dims.sequence_length):
        return
    allowed = f"null, or model.sequenceLength, {dims.sequence_length}, and more: every token sees all before it"
    shorter = isinstance(found, int) and found > 0
    fix = f"set model.sequenceLength to {found} or less, or choose other weights" if shorter else "choose other weights"
    yield Difference(f"{family.window} is {found!r}", allowed, fix)


def _odd_rotary(config: Mapping[str, Any]) -> Iterator[Difference]:
    scaling = config.get("rope_scaling") or {}
    for holder in (config, scaling if isinstance(scaling, Mapping) else {"rope_type": scaling}):
        kind = holder.get("rope_type", holder.get("type"))
        if kind not in UNSCALED:
            fix = "choose weights that were made without scaling of rotary positions"
            yield Difference(f"rope_scaling is of type {kind!r}", "rotary positions without scaling", fix)
    turned = config.get("partial_rotary_factor", 1)
    if turned not in (None, 1):
        yield Difference(f"partial_rotary_factor is {turned!r}", "1: whole heads are turned", "choose other weights")
