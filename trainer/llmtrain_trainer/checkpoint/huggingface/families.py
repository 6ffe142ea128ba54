"""How Hugging Face names our models' parts. One table for both directions; a new family is one more `Family`.

Our rotary positions turn the two halves of a head, as transformers' `rotate_half` does, and a matrix is [out, in] on
both sides: no value moves within a tensor.

Source: transformers, models/llama/{modeling,configuration}_llama.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.model.transformer import Transformer

LAYER = re.compile(r"^layers\.(\d+)\.")
EXPERT = "{e}"


@dataclass(frozen=True)
class Names:
    """Their name of one of our parameters; `{n}` is the layer's number on both sides.

    With `{e}` our parameter stacks their tensors: ours at index e of its first dim is theirs of expert e.
    """

    theirs: str
    fields: tuple[str, ...]
    """The field of spec.model that decides each dim of theirs."""


@dataclass(frozen=True)
class Family:
    """What must be known of one kind of model to write it as theirs, and to read it."""

    model_type: str
    architecture: str
    dimensions: Mapping[str, str]
    """Key of config.json to the attribute of ModelDimensions that it has to equal."""
    fixed: Mapping[str, Any]
    """Key of config.json to the one value that our network computes with."""
    defaults: Mapping[str, Any]
    """What transformers takes for a key that config.json leaves out. A dimension without one has to be there."""
    names: Mapping[str, Names]
    """By our name."""
    tied: tuple[str, str]
    """Theirs: with tie_word_embeddings, the first takes its values from the second."""


@dataclass(frozen=True)
class Part:
    """One of their tensors: a box of one of our parameters."""

    theirs: str
    ours: str
    index: int | None
    """Our parameter at this index of its first dim is their tensor; None: all of it."""
    whole: tuple[int, ...]
    """Shape of our parameter."""
    fields: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of their tensor."""
        return self.whole if self.index is None else self.whole[1:]


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    dimensions={
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "ffn_dim",
        "vocab_size": "vocab_size",
        "rms_norm_eps": "norm_epsilon",
        "rope_theta": "rope_theta",
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    },
    names={
        "embedding.weight": Names("model.embed_tokens.weight", ("vocabSize", "dim")),
        "layers.{n}.attention_norm.weight": Names("model.layers.{n}.input_layernorm.weight", ("dim",)),
        "layers.{n}.attention.wq.weight": Names("model.layers.{n}.self_attn.q_proj.weight", ("dim", "dim")),
        "layers.{n}.attention.wk.weight": Names("model.layers.{n}.self_attn.k_proj.weight", ("kvHeads", "dim")),
        "layers.{n}.attention.wv.weight": Names("model.layers.{n}.self_attn.v_proj.weight", ("kvHeads", "dim")),
        "layers.{n}.attention.wo.weight": Names("model.layers.{n}.self_attn.o_proj.weight", ("dim", "dim")),
        "layers.{n}.feed_forward_norm.weight": Names("model.layers.{n}.post_attention_layernorm.weight", ("dim",)),
        "layers.{n}.feed_forward.gate.weight": Names("model.layers.{n}.mlp.gate_proj.weight", ("ffnDim", "dim")),
        "layers.{n}.feed_forward.up.weight": Names("model.layers.{n}.mlp.up_proj.weight", ("ffnDim", "dim")),
        "layers.{n}.feed_forward.down.weight": Names("model.layers.{n}.mlp.down_proj.weight", ("dim", "ffnDim")),
        "norm.weight": Names("model.norm.weight", ("dim",)),
        "output.weight": Names("lm_head.weight", ("vocabSize", "dim")),
    },
    tied=("lm_head.weight", "model.embed_tokens.weight"),
)


def family_of(dims: ModelDimensions) -> Family:
    """Return the family that a model of these dimensions belongs to: the only door at which they are told apart."""
    return LLAMA


def parameter_shapes(dims: ModelDimensions) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of each of our parameters by name, in the model's order."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(dims).named_parameters()}


def parts_of(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> list[Part]:
    """Return every tensor of theirs that together hold our parameters of these shapes, in the order of `shapes`."""
    return [part for ours, whole in shapes.items() for part in _parts(family, ours, whole)]


def _parts(family: Family, ours: str, whole: tuple[int, ...]) -> Iterator[Part]:
    match = LAYER.match(ours)
    names = family.names[LAYER.sub("layers.{n}.", ours)]
    theirs = names.theirs.replace("{n}", match[1] if match else "")
    if EXPERT not in theirs:
        yield Part(theirs, ours, None, whole, names.fields)
        return
    for expert in range(whole[0]):
        yield Part(theirs.replace(EXPERT, str(expert)), ours, expert, whole, names.fields)
