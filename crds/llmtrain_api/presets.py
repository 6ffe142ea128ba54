"""Model sizes by name. Dimensions are those of the published models; `demo` and `tiny` are ours, for CPUs."""

from __future__ import annotations

from typing import Final

from llmtrain_api.meta import ApiModel


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

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def parameter_count(self) -> int:
        """Number of trainable parameters, embeddings included."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        return 2 * self.vocab_size * self.dim + self.layers * layer + self.dim

    def layer_flops(self) -> int:
        """Floating-point operations of one layer's forward pass, per token: matrices, and causal attention."""
        matrices = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 3 * self.dim * self.ffn_dim
        return 2 * matrices + 2 * self.dim * self.sequence_length

    def output_flops(self) -> int:
        """Floating-point operations of the output matrix's forward pass, per token."""
        return 2 * self.dim * self.vocab_size


def _size(*numbers: int, rope_theta: float = 10_000.0) -> ModelDimensions:
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
    )


PRESETS: Final[dict[str, ModelDimensions]] = {
    "tiny": _size(64, 2, 4, 2, 192, 320, 64),
    "demo": _size(192, 4, 6, 2, 512, 320, 128),
    "llama-1b": _size(2048, 16, 32, 8, 8192, 128_256, 8192, rope_theta=500_000.0),
    "llama-7b": _size(4096, 32, 32, 32, 11_008, 32_000, 4096),
    "llama-8b": _size(4096, 32, 32, 8, 14_336, 128_256, 8192, rope_theta=500_000.0),
    "llama-70b": _size(8192, 80, 64, 8, 28_672, 128_256, 8192, rope_theta=500_000.0),
}
