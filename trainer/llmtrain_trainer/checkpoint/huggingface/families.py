"""How Hugging Face names our models' parts. One table for both directions; a new family is one more `Family`.

Our rotary positions turn the two halves of a head, as transformers' `rotate_half` does, and a matrix is [out, in] on
both sides: no value moves within a tensor. Of a mixture, theirs are one matrix per expert, which transformers 4 and 5
both read and write; in memory version 5 stacks them, gate above up.

Sources: transformers, models/{llama,mixtral}/{modeling,configuration}_*.py, conversion_mapping.py (mixtral).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic.alias_generators import to_camel

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.errors import UserError
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
    """Key of config.json to the attribute of ModelDimensions that it has to equal; a dot leads into its mixture."""
    fixed: Mapping[str, Any]
    """Key of config.json to the one value that our network computes with."""
    defaults: Mapping[str, Any]
    """What transformers takes for a key that config.json leaves out. A dimension without one has to be there."""
    names: Mapping[str, Names]
    """By our name."""
    tied: tuple[str, str]
    """Theirs: with tie_word_embeddings, the first takes its values from the second."""
    how: str
    """What to do with spec.model to train a model of this family."""
    window: str | None = None
    """Key of config.json for how many tokens a query may see; None: always all before it."""
    stacked: str | None = None
    """End of the name of a tensor that holds all experts of a layer, which transformers writes if it is told to."""


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


@dataclass(frozen=True)
class Limit:
    """What their form of a mixture has no word for, and ours has."""

    attribute: str
    """Of MoeDimensions."""
    fits: Callable[[Any], bool]
    problem: str
    allowed: str
    from_training: bool = False
    """First weights do not have it: only training brings it."""


_DIMENSIONS = {
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rope_theta",
}
_NAMES = {
    "embedding.weight": Names("model.embed_tokens.weight", ("vocabSize", "dim")),
    "layers.{n}.attention_norm.weight": Names("model.layers.{n}.input_layernorm.weight", ("dim",)),
    "layers.{n}.attention.wq.weight": Names("model.layers.{n}.self_attn.q_proj.weight", ("dim", "dim")),
    "layers.{n}.attention.wk.weight": Names("model.layers.{n}.self_attn.k_proj.weight", ("kvHeads", "dim")),
    "layers.{n}.attention.wv.weight": Names("model.layers.{n}.self_attn.v_proj.weight", ("kvHeads", "dim")),
    "layers.{n}.attention.wo.weight": Names("model.layers.{n}.self_attn.o_proj.weight", ("dim", "dim")),
    "layers.{n}.feed_forward_norm.weight": Names("model.layers.{n}.post_attention_layernorm.weight", ("dim",)),
    "norm.weight": Names("model.norm.weight", ("dim",)),
    "output.weight": Names("lm_head.weight", ("vocabSize", "dim")),
}
"""Of all but the feed-forward networks."""
_TIED = ("lm_head.weight", "model.embed_tokens.weight")

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    dimensions={**_DIMENSIONS, "intermediate_size": "ffn_dim"},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    },
    names={
        **_NAMES,
        "layers.{n}.feed_forward.gate.weight": Names("model.layers.{n}.mlp.gate_proj.weight", ("ffnDim", "dim")),
        "layers.{n}.feed_forward.up.weight": Names("model.layers.{n}.mlp.up_proj.weight", ("ffnDim", "dim")),
        "layers.{n}.feed_forward.down.weight": Names("model.layers.{n}.mlp.down_proj.weight", ("dim", "ffnDim")),
    },
    tied=_TIED,
    how="leave model.moe out and use no preset with experts",
)
_MOE = "model.layers.{n}.block_sparse_moe"
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    dimensions={
        **_DIMENSIONS,
        "intermediate_size": "moe.ffn_dim",
        "num_local_experts": "moe.experts",
        "num_experts_per_tok": "moe.top_k",
    },
    fixed={"hidden_act": "silu"},
    defaults={
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    },
    names={
        **_NAMES,
        "layers.{n}.feed_forward.router.weight": Names(f"{_MOE}.gate.weight", ("moe.experts", "dim")),
        "layers.{n}.feed_forward.experts.gate.weight": Names(f"{_MOE}.experts.{{e}}.w1.weight", ("moe.ffnDim", "dim")),
        "layers.{n}.feed_forward.experts.up.weight": Names(f"{_MOE}.experts.{{e}}.w3.weight", ("moe.ffnDim", "dim")),
        "layers.{n}.feed_forward.experts.down.weight": Names(f"{_MOE}.experts.{{e}}.w2.weight", ("dim", "moe.ffnDim")),
    },
    tied=_TIED,
    how="use a preset with experts, or set model.moe as config.json has it",
    window="sliding_window",
    stacked=".mlp.experts.gate_up_proj",
)
FAMILIES = {family.model_type: family for family in (LLAMA, MIXTRAL)}
LIMITS = (
    Limit("shared_experts", lambda v: v == 0, "has no experts that every token passes", "0"),
    Limit("every_n_layers", lambda v: v == 1, "has experts in every layer", "1"),
    Limit("top_k", lambda v: v > 1, "gives a token's only expert the weight 1, and we give it its chance", "2 or more"),
    Limit("capacity_factor", lambda v: v is None, "drops no token", "none: leave it out"),
    Limit("bias_rate", lambda v: v == 0, "has no bias that balances experts", "0", from_training=True),
)


def family_of(dims: ModelDimensions, *, untrained: bool = False) -> Family:
    """Return the family that a model of these dimensions belongs to: the only door at which they are told apart.

    Args:
        dims: of the model.
        untrained: it is not to be written, only to start from weights of the family.

    Raises:
        UserError: it has a mixture of experts that no family can hold.
    """
    if dims.moe is None:
        return LLAMA
    for limit in LIMITS:
        value = getattr(dims.moe, limit.attribute)
        if not (limit.fits(value) or (untrained and limit.from_training)):
            field = f"model.moe.{to_camel(limit.attribute)}"
            raise UserError(
                field,
                value,
                f"Hugging Face's Mixtral, which weights of a mixture come from and go to, {limit.problem}",
                allowed=limit.allowed,
                fix=f"correct {field} in a job whose weights come from transformers or are to go there",
            )
    return MIXTRAL


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
