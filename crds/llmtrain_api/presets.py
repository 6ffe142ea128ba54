"""Model sizes by name, and what follows from them. Dimensions are those of the published models; `tiny` and `demo` are
ours, for CPUs, and `moe-32x7b` is llama-8b with 32 experts in every layer.
"""

from __future__ import annotations

from typing import Any, Final

from llmtrain_api.meta import ApiModel


class MoeDimensions(ApiModel):
    """A mixture of experts with every dimension decided."""

    experts: int
    top_k: int
    ffn_dim: int
    """Inner width of one expert."""
    shared_experts: int = 0
    """They make one feed-forward network of so many times an expert's width, which every token passes."""
    every_n_layers: int = 1
    capacity_factor: float | None = None
    """None: dropless."""
    balance_coefficient: float = 0.01
    z_coefficient: float = 0.001
    bias_rate: float = 0.0


class ModelDimensions(ApiModel):
    """A decoder-only transformer with every dimension decided (RMSNorm, RoPE, GQA, SwiGLU, untied output)."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int
    sequence_length: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    moe: MoeDimensions | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer, counted from 0, is a mixture of experts: every n-th is, the n-th first."""
        return self.moe is not None and (layer + 1) % self.moe.every_n_layers == 0

    def expert_layers(self) -> list[int]:
        """Return the layers that are mixtures of experts."""
        return [layer for layer in range(self.layers) if self.has_experts(layer)]

    def parameter_count(self) -> int:
        """Number of trainable parameters, embeddings included."""
        layers = sum(
            self.attention_parameters() + self._feed_forward(n, active=False) + 2 * self.dim for n in range(self.layers)
        )
        return 2 * self.vocab_size * self.dim + layers + self.dim

    def active_parameter_count(self) -> int:
        """Number of parameters that work on one token: of a mixture's experts, the chosen and the shared ones."""
        layers = sum(
            self.attention_parameters() + self._feed_forward(n, active=True) + 2 * self.dim for n in range(self.layers)
        )
        return 2 * self.vocab_size * self.dim + layers + self.dim

    def layer_flops(self, layer: int) -> int:
        """Floating-point operations of one layer's forward pass, per token: matrices, and causal attention."""
        matrices = self.attention_parameters() + self._feed_forward(layer, active=True)
        return 2 * matrices + 2 * self.dim * self.sequence_length

    def flops_per_token(self) -> int:
        """Floating-point operations of a forward pass, per token. Backward takes twice as many."""
        return sum(self.layer_flops(layer) for layer in range(self.layers)) + self.output_flops()

    def attention_parameters(self) -> int:
        """Number of parameters of one layer's attention."""
        return self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def _feed_forward(self, layer: int, *, active: bool) -> int:
        """Return the parameters of a layer's feed-forward part: all, or those that one token meets."""
        if self.moe is None or not self.has_experts(layer):
            return 3 * self.dim * self.ffn_dim
        experts = (self.moe.top_k if active else self.moe.experts) + self.moe.shared_experts
        return experts * 3 * self.dim * self.moe.ffn_dim + self.moe.experts * self.dim

    def output_flops(self) -> int:
        """Floating-point operations of the output matrix's forward pass, per token."""
        return 2 * self.dim * self.vocab_size


def _size(*numbers: int, rope_theta: float = 10_000.0, moe: MoeDimensions | None = None) -> ModelDimensions:
    dim, layers, heads, kv_heads, ffn_dim, vocab_size, sequence_length = numbers
    return ModelDimensions(
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        rope_theta=rope_theta,
        moe=moe,
    )


def _experts(experts: int, ffn_dim: int, **more: Any) -> MoeDimensions:
    return MoeDimensions(experts=experts, top_k=2, ffn_dim=ffn_dim, **more)


PRESETS: Final[dict[str, ModelDimensions]] = {
    "tiny": _size(64, 2, 4, 2, 192, 320, 64),
    "demo": _size(192, 4, 6, 2, 512, 320, 128),
    "llama-1b": _size(2048, 16, 32, 8, 8192, 128_256, 8192, rope_theta=500_000.0),
    "llama-7b": _size(4096, 32, 32, 32, 11_008, 32_000, 4096),
    "llama-8b": _size(4096, 32, 32, 8, 14_336, 128_256, 8192, rope_theta=500_000.0),
    "llama-70b": _size(8192, 80, 64, 8, 28_672, 128_256, 8192, rope_theta=500_000.0),
    "llama-405b": _size(16_384, 126, 128, 8, 53_248, 128_256, 8192, rope_theta=500_000.0),
    "tiny-moe": _size(64, 2, 4, 2, 192, 320, 64, moe=_experts(8, 64)),
    "demo-moe": _size(192, 4, 6, 2, 512, 320, 128, moe=_experts(32, 128, shared_experts=1)),
    "mixtral-8x7b": _size(4096, 32, 32, 8, 14_336, 32_000, 8192, rope_theta=1e6, moe=_experts(8, 14_336)),
    "moe-32x7b": _size(4096, 32, 32, 8, 14_336, 128_256, 8192, rope_theta=500_000.0, moe=_experts(32, 14_336)),
}
