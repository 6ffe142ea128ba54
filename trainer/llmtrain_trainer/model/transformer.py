"""A decoder-only transformer of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape suffixes:
    B  sequences in the micro-batch      L  tokens per sequence       D  width of the residual stream
    H  query heads                       K  key/value heads           E  width of one head (D / H)
    F  width of the feed-forward         V  vocabulary                S  keys that queries may see

Sources: Touvron et al. 2023 (LLaMA, arXiv:2302.13971), Zhang and Sennrich 2019 (RMSNorm), Su et al. 2021 (RoPE),
Ainslie et al. 2023 (GQA), Shazeer 2020 (SwiGLU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmtrain_api.presets import ModelDimensions, MoeDimensions
from llmtrain_trainer.model.functions import normalise, rotate
from llmtrain_trainer.model.moe import MixtureOfExperts


class RMSNorm(nn.Module):
    """Scale to unit root mean square, in fp32 whatever the input's type."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x_BLD: Tensor) -> Tensor:
        return normalise(x_BLD, self.weight, self.epsilon)


def rotary_tables(dims: ModelDimensions, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, fp32 [L, E], of every position; the sine of a head's first half is negative.

    Computed in float64 so that every device and layout rounds to the same tables.
    """
    exponent = torch.arange(0, dims.head_dim, 2, dtype=torch.float64) / dims.head_dim
    frequency = dims.rope_theta**-exponent
    angle = torch.outer(torch.arange(dims.sequence_length, dtype=torch.float64), frequency)
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def attend(q_BLHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask_LS: Tensor | None = None) -> Tensor:
    """Return grouped-query attention [B, L, H, E] over S keys: causal, or what `mask_LS` allows."""
    q_BHLE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BLHE, k_BSKE, v_BSKE))
    repeat = q_BHLE.shape[1] // k_BKSE.shape[1]
    if repeat > 1 and not q_BHLE.is_cuda:
        # The CPU's flash kernel takes no groups; without this, torch falls back to materialising the scores.
        k_BKSE, v_BKSE = k_BKSE.repeat_interleave(repeat, dim=1), v_BKSE.repeat_interleave(repeat, dim=1)
        repeat = 1
    o_BHLE = functional.scaled_dot_product_attention(
        q_BHLE, k_BKSE, v_BKSE, attn_mask=mask_LS, is_causal=mask_LS is None, enable_gqa=repeat > 1
    )
    return o_BHLE.transpose(1, 2)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = dims.heads, dims.kv_heads, dims.head_dim
        self.wq = nn.Linear(dims.dim, dims.heads * dims.head_dim, bias=False)
        self.wk = nn.Linear(dims.dim, dims.kv_heads * dims.head_dim, bias=False)
        self.wv = nn.Linear(dims.dim, dims.kv_heads * dims.head_dim, bias=False)
        self.wo = nn.Linear(dims.heads * dims.head_dim, dims.dim, bias=False)
        self.core: Callable[[Tensor, Tensor, Tensor], Tensor] = attend
        """What mixes tokens: the only part that must see keys of the whole sequence."""

    def forward(self, x_BLD: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
        B, L, _ = x_BLD.shape
        q_BLHE = rotate(self.wq(x_BLD).view(B, L, self.heads, self.head_dim), cos_LE, sin_LE)
        k_BLKE = rotate(self.wk(x_BLD).view(B, L, self.kv_heads, self.head_dim), cos_LE, sin_LE)
        v_BLKE = self.wv(x_BLD).view(B, L, self.kv_heads, self.head_dim)
        return self.wo(self.core(q_BLHE, k_BLKE, v_BLKE).reshape(B, L, self.heads * self.head_dim))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x_BLD)) * self.up(x_BLD))


def _dense(dims: ModelDimensions) -> FeedForward | MixtureOfExperts:
    return FeedForward(dims.dim, dims.ffn_dim)


def _experts(dim: int, moe: MoeDimensions) -> FeedForward | MixtureOfExperts:
    shared = FeedForward(dim, moe.shared_experts * moe.ffn_dim) if moe.shared_experts else None
    return MixtureOfExperts(dim, moe, shared)


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, dims: ModelDimensions, number: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dims.dim, dims.norm_epsilon)
        self.attention = Attention(dims)
        self.feed_forward_norm = RMSNorm(dims.dim, dims.norm_epsilon)
        self.feed_forward = _experts(dims.dim, dims.moe) if dims.moe and dims.has_experts(number) else _dense(dims)

    def forward(self, x_BLD: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos_LE, sin_LE)
        return x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))


class Transformer(nn.Module):
    """Tokens to logits, or one stage of that: `keep` drops what other stages hold, and the names stay.

    The first stage has an embedding, the last has norm and output; a stage without them passes the residual stream on.
    """

    def __init__(self, dims: ModelDimensions) -> None:
        super().__init__()
        self.dims = dims
        self.embedding: nn.Module | None = nn.Embedding(dims.vocab_size, dims.dim)
        self.layers = nn.ModuleDict({str(i): Block(dims, i) for i in range(dims.layers)})
        self.norm: RMSNorm | None = RMSNorm(dims.dim, dims.norm_epsilon)
        self.output: nn.Linear | None = nn.Linear(dims.dim, dims.vocab_size, bias=False)

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Become one stage of the model: drop all but these layers, and the ends that it has not."""
        for number in set(map(int, self.layers)) - set(layers):
            del self.layers[str(number)]
        if not first:
            self.embedding = None
        if not last:
            self.norm, self.output = None, None

    def blocks(self) -> Iterator[Block]:
        """Yield the layers, typed."""
        yield from cast(Iterable[Block], self.layers.values())

    def mixtures(self) -> dict[int, MixtureOfExperts]:
        """Return the layers' mixtures of experts by the layers' numbers."""
        layers = ((int(name), cast(Block, block).feed_forward) for name, block in self.layers.items())
        return {number: part for number, part in layers if isinstance(part, MixtureOfExperts)}

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits [B, L, V] of tokens [B, L], in the compute type. `rotary` comes from rotary_tables.

        A stage that is not the first takes, and one that is not the last returns, the residual stream [B, L, D].
        """
        x_BLD = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, *rotary)
        if self.norm is None or self.output is None:
            return x_BLD
        logits_BLV: Tensor = self.output(self.norm(x_BLD))
        return logits_BLV


def loss_sum(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return the summed cross-entropy, fp32 scalar. The caller divides by the tokens of the whole global batch."""
    return functional.cross_entropy(logits_BLV.float().flatten(0, 1), targets_BL.flatten(), reduction="sum")
