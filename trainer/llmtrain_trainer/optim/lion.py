"""Lion (Chen et al. 2023, arXiv:2302.06675, program 1): every element moves by the rate, in the momentum's direction.

Half of AdamW's state. The paper advises a rate 3-10 times smaller and a decay 3-10 times larger than AdamW's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """State of each parameter: exp_avg, the momentum."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. There is nothing to re-evaluate, so `closure` is not called."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            momenta = [self._momentum(p) for p in parameters]
            beta1, beta2 = group["betas"]
            directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, directions, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["exp_avg"]
        return momentum
