"""A mixture of experts: a router sends each token through the few feed-forward networks that suit it.

Shape suffixes, besides those of transformer.py:
    X  experts        K  experts that work on one token        P  pairs of a token and one of its experts

The choice of a token depends on that token alone, and what balances the load is known before the step begins, so the
result does not depend on how tokens are spread over ranks and micro-batches:
- the balance loss (Fedus et al. 2022, eq. 4) takes each expert's share of the load from the whole global batch of the
  step before, as the bias of loss-free balancing does (Wang et al. 2024, arXiv:2408.15664). Shares of the own
  micro-batch would differ with the layout, and hold experts back from specialising (Qiu et al. 2025, arXiv:2501.11873);
- capacity counts within a sequence (Dai et al. 2024 balance there too), not within a micro-batch.

Sources: Shazeer et al. 2017, Fedus et al. 2022 (Switch), Zoph et al. 2022 (z-loss), Jiang et al. 2024 (Mixtral),
DeepSeek-AI 2024 (shared experts, bias).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmtrain_api.presets import MoeDimensions


class _AddLoss(torch.autograd.Function):
    """Lets a loss of its own ride on a tensor: forward passes the tensor on, backward gives the loss a gradient of 1.

    So no layer has to hand its losses up, through pipeline stages and recomputation, to where backward begins.
    """

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        ctx.of_loss = torch.ones_like(loss)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.of_loss


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one micro-batch go."""

    experts: Tensor
    """int64 [B, L, K]; X for a choice that found the expert full."""
    weights: Tensor
    """fp32 [B, L, K]; of each token they sum to 1 where there are several, what was dropped included."""
    dropless: bool


@dataclass
class Memory:
    """A router's choice [B, L, K], kept for the time when its layer is computed again."""

    experts: Tensor | None = None


class Router(nn.Module):
    """Chooses experts by softmax and top-k; keeps count of its choices, and of what balances them.

    `load` and `bias` change once per step, by `balance`; they are part of the training state.
    """

    def __init__(self, dim: int, moe: MoeDimensions) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, dim))
        self.load: Tensor
        self.bias: Tensor
        self.choices: Tensor
        self.register_buffer("load", torch.empty(moe.experts))
        self.register_buffer("bias", torch.empty(moe.experts))
        self.register_buffer("choices", torch.empty(moe.experts, dtype=torch.int64), persistent=False)
        self.memory: Memory | None = None
        """Where the choice of the next forward pass is written, or read and not counted again."""
        self.loss_scale = 1.0
        """What a token's losses are multiplied with: 1 / tokens of the global batch."""
        self.parts = 1
        """Ranks that hold parts of the same sequences."""
        self.taken_before: Callable[[Tensor], Tensor] = torch.zeros_like
        """Given this rank's choices [B, X], returns those of the earlier parts of the same sequences."""

    @torch.no_grad()
    def reset(self) -> None:
        """Begin without history: an even load, no bias, nothing counted."""
        self.load.fill_(1.0 / self.moe.experts)
        self.bias.zero_()
        self.choices.zero_()

    def forward(self, x_BLD: Tensor) -> Routing:
        logits_BLX = functional.linear(x_BLD.float(), self.weight.float())
        chances_BLX = logits_BLX.softmax(dim=-1)
        preferred_BLX = chances_BLX + self.bias if self.moe.bias_rate else chances_BLX
        experts_BLK, again = self._choose(preferred_BLX)
        weights_BLK = chances_BLX.gather(-1, experts_BLK)
        if self.moe.top_k > 1:  # of one choice the chance itself is the weight, or the router would learn nothing
            weights_BLK = weights_BLK / weights_BLK.sum(dim=-1, keepdim=True)
        weights_BLK = _AddLoss.apply(weights_BLK, self._loss(logits_BLX, chances_BLX))
        taken_BX = _count(experts_BLK.flatten(1), self.moe.experts)
        if not again:
            self.choices += taken_BX.sum(dim=0)
        if self.moe.capacity_factor is None:
            return Routing(experts_BLK, weights_BLK, dropless=True)
        full_BLK = self._full(experts_BLK, taken_BX)
        return Routing(experts_BLK.masked_fill(full_BLK, self.moe.experts), weights_BLK, dropless=False)

    @torch.no_grad()
    def _choose(self, preferred_BLX: Tensor) -> tuple[Tensor, bool]:
        """Return the chosen experts [B, L, K], and whether this repeats an earlier choice."""
        if self.memory is not None and self.memory.experts is not None:
            return self.memory.experts, True
        experts_BLK = preferred_BLX.topk(self.moe.top_k, dim=-1).indices
        if self.memory is not None:
            self.memory.experts = experts_BLK
        return experts_BLK, False

    @torch.no_grad()
    def balance(self, choices_X: Tensor) -> None:
        """Take in how often each expert was chosen in the whole global batch of the step that ends."""
        share_X = choices_X.float() / choices_X.sum().clamp(min=1)
        self.load.copy_(share_X)
        self.bias += self.moe.bias_rate * (1.0 / self.moe.experts - share_X).sign()

    def _loss(self, logits_BLX: Tensor, chances_BLX: Tensor) -> Tensor:
        """Return the balance loss and the z-loss of these tokens, as parts of their means over the global batch."""
        balance = self.moe.experts * (chances_BLX @ self.load).sum()
        z = logits_BLX.logsumexp(dim=-1).square().sum()
        return self.loss_scale * (self.moe.balance_coefficient * balance + self.moe.z_coefficient * z)

    @torch.no_grad()
    def _full(self, experts_BLK: Tensor, taken_BX: Tensor) -> Tensor:
        """Return which choices come too late: earlier tokens of the sequence have filled the expert."""
        B, L, K = experts_BLK.shape
        assert self.moe.capacity_factor is not None
        before_BX = self.taken_before(taken_BX)
        capacity = math.ceil(self.moe.capacity_factor * L * self.parts * K / self.moe.experts)
        chosen_BPX = functional.one_hot(experts_BLK.flatten(1), self.moe.experts)
        place_BPX = chosen_BPX.cumsum(dim=1) - 1 + before_BX.unsqueeze(1)
        place_BP = place_BPX.gather(2, experts_BLK.flatten(1).unsqueeze(2)).squeeze(2)
        return (place_BP >= capacity).view(B, L, K)


class ExpertMatrix(nn.Module):
    """One matrix per expert, [X, out, in]."""

    def __init__(self, experts: int, wide: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out, wide))

    def forward(self, x_PD: Tensor, ends_X: Tensor) -> Tensor:
        """Multiply each run of rows, which end at `ends_X` (int32), with its expert's matrix."""
        return functional.grouped_mm(x_PD, self.weight.transpose(-2, -1), offs=ends_X)


class Experts(nn.Module):
    """SwiGLU networks side by side."""

    def __init__(self, dim: int, moe: MoeDimensions) -> None:
        super().__init__()
        self.gate = ExpertMatrix(moe.experts, dim, moe.ffn_dim)
        self.up = ExpertMatrix(moe.experts, dim, moe.ffn_dim)
        self.down = ExpertMatrix(moe.experts, moe.ffn_dim, dim)

    def forward(self, x_PD: Tensor, counts_X: Tensor) -> Tensor:
        """Return what the experts make of their rows, which lie expert by expert."""
        ends_X = counts_X.cumsum(dim=0).to(torch.int32)
        return self.down(functional.silu(self.gate(x_PD, ends_X)) * self.up(x_PD, ends_X), ends_X)


def compute_here(x_PD: Tensor, counts_X: Tensor, experts: Experts) -> Tensor:
    """Run the rows through experts that are all on this rank."""
    y_PD: Tensor = experts(x_PD, counts_X)
    return y_PD


class MixtureOfExperts(nn.Module):
    """Takes the place of a layer's feed-forward network."""

    def __init__(self, dim: int, moe: MoeDimensions, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(dim, moe)
        self.experts = Experts(dim, moe)
        self.shared = shared
        self.compute: Callable[[Tensor, Tensor, Experts], Tensor] = compute_here
        """What brings rows to their experts and back: the only part that must know where experts are."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        routing: Routing = self.router(x_BLD)
        D, K = x_BLD.shape[-1], routing.experts.shape[-1]
        experts_P = routing.experts.flatten()
        counts_X = _count(experts_P.unsqueeze(0), self.router.moe.experts).squeeze(0)
        order_P = experts_P.argsort(stable=True)
        if not routing.dropless:
            order_P = order_P[: int(counts_X.sum())]  # the full come last
        # Each row of a pair is its own, so that no sum depends on the order in which a GPU adds.
        pairs_PD = x_BLD.reshape(-1, 1, D).expand(-1, K, -1).reshape(-1, D)
        y_PD = self.compute(pairs_PD.index_select(0, order_P), counts_X, self.experts)
        back_PD = torch.zeros_like(pairs_PD).index_copy(0, order_P, y_PD.to(pairs_PD.dtype))
        weights_BLK1 = routing.weights.unsqueeze(-1)
        mixed_BLD = (back_PD.view(*routing.experts.shape, D).float() * weights_BLK1).sum(dim=2).to(x_BLD.dtype)
        return mixed_BLD if self.shared is None else mixed_BLD + self.shared(x_BLD)


def _count(experts_BP: Tensor, experts: int) -> Tensor:
    """Return how often each expert occurs in each row, int64 [B, X]; X itself, a dropped choice, is not counted."""
    counts = experts_BP.new_zeros(experts_BP.shape[0], experts + 1)
    return counts.scatter_add_(1, experts_BP, torch.ones_like(experts_BP))[:, :experts]
