"""The part of the spec that says what is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmtrain_api.meta import ApiModel, Positive32
from llmtrain_api.presets import PRESETS, ModelDimensions
from llmtrain_api.uris import FOLDER_PATTERN

PresetName = Literal[
    "tiny",
    "demo",
    "llama-1b",
    "llama-7b",
    "llama-8b",
    "llama-70b",
    "llama-405b",
    "tiny-moe",
    "demo-moe",
    "mixtral-8x7b",
    "moe-32x7b",
]


class MixtureOfExperts(ApiModel):
    """Feed-forward networks of which each token passes the few that a router chooses.

    The router's choice is softmax and top-k, its weights made to sum to one. Nothing is dropped unless capacityFactor
    says so.
    """

    experts: Annotated[int, Field(ge=2, le=1024, json_schema_extra={"format": "int32"})] = 32
    """Experts in a layer."""
    top_k: Annotated[int, Field(ge=1, le=64, json_schema_extra={"format": "int32"})] = 2
    """Experts that work on one token."""
    ffn_dim: Positive32 | None = None
    """Inner width of one expert. Default: the model's ffnDim."""
    shared_experts: Annotated[int, Field(ge=0, le=64, json_schema_extra={"format": "int32"})] = 0
    """Experts that work on every token, besides the chosen ones."""
    every_n_layers: Annotated[int, Field(ge=1, le=1024, json_schema_extra={"format": "int32"})] = 1
    """1: every layer has experts; n: every n-th has, and the others are dense."""
    capacity_factor: Annotated[float, Field(gt=0, le=64)] | None = None
    """An expert takes at most this many times its even share of a sequence's tokens; the rest pass it by. Default: no
    limit."""
    balance_coefficient: Annotated[float, Field(ge=0, le=10)] = 0.01
    """Weight of the loss that pulls towards an even load, by the loads of the whole global batch of the step before."""
    z_coefficient: Annotated[float, Field(ge=0, le=10)] = 0.001
    """Weight of the router's z-loss, which keeps its logits small (Zoph et al., 2022)."""
    bias_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Balancing without a loss (Wang et al., 2024): after each step an expert's bias moves by this much, up where it
    had less than its share. 0: off; 0.001 is usual, with balanceCoefficient 0 or close to it."""


class Model(ApiModel):
    """A preset, or all dimensions in the open, or a preset with some dimensions changed."""

    preset: PresetName | None = None
    """Name of a published or built-in size."""
    dim: Positive32 | None = None
    """Width of the residual stream."""
    layers: Positive32 | None = None
    """Number of transformer blocks."""
    heads: Positive32 | None = None
    """Query heads of attention; divides dim into heads of an even width."""
    kv_heads: Positive32 | None = None
    """Key/value heads of grouped-query attention; divides heads."""
    ffn_dim: Positive32 | None = None
    """Inner width of the feed-forward network."""
    vocab_size: Positive32 | None = None
    """Number of tokens the model knows; at least 257 where text is read as bytes."""
    sequence_length: Positive32 | None = None
    """Tokens per sequence."""
    rope_theta: Annotated[float, Field(ge=1, le=1e12)] | None = None
    """Base of the rotary positions' frequencies. Default: the preset's; 10000 without one."""
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] | None = None
    """Added to the mean square before RMSNorm takes its root. Default: the preset's; 1e-5 without one."""
    init_from: Annotated[str, Field(min_length=1, max_length=1024, pattern=FOLDER_PATTERN)] | None = None
    """First weights, used as long as the job has no checkpoint: a folder that Hugging Face transformers wrote
    (config.json and safetensors, one file or several with an index), as pvc://CLAIM/PATH or file:///PATH. Left out:
    drawn from training.seed."""
    moe: MixtureOfExperts | None = None
    """Makes feed-forward layers mixtures of experts. Replaces what the preset has."""

    def dimensions(self) -> ModelDimensions:
        """Return every dimension decided: the preset's, overridden by what is written here.

        Raises:
            ValueError: neither a preset nor all dimensions are given.
        """
        base = PRESETS[self.preset].model_dump() if self.preset else {}
        own = {k: v for k, v in self.model_dump(exclude={"preset", "moe", "init_from"}).items() if v is not None}
        missing = [f for f in MODEL_DIMENSION_FIELDS if f not in base and f not in own]
        if missing:
            raise ValueError(f"without a preset these dimensions are needed: {', '.join(missing)}")
        decided = {**base, **own}
        if self.moe is not None:
            decided["moe"] = {**self.moe.model_dump(), "ffn_dim": self.moe.ffn_dim or decided["ffn_dim"]}
        return ModelDimensions(**decided)


MODEL_DIMENSION_FIELDS = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size", "sequence_length")
