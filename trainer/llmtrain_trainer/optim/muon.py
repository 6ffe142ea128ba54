"""Muon (Jordan et al. 2024): a matrix moves by its momentum with all singular values made alike.

For matrices inside layers; what is no matrix, and both ends of the model, are AdamW's. The update is scaled to the size
of AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2), so that AdamW's rate and decay serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llmtrain_trainer.parallel.wholes import Wholes

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial that takes singular values towards 1, chosen for speed (Jordan et al.): they end in 0.7 to 1.2."""
ITERATIONS = 5
RMS_OF_ADAMW = 0.2
_TINY = 1e-7


def orthogonalised(matrices_NRC: Tensor) -> Tensor:
    """Return N matrices with their singular values near 1, by Newton-Schulz iterations in the type they have."""
    tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    x = matrices_NRC.mT if tall else matrices_NRC
    precise = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=precise)
    x = x / (norms + _TINY).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def scale_of(rows: int, columns: int) -> float:
    """Return the factor that gives an orthogonal matrix the root mean square of AdamW's updates."""
    return RMS_OF_ADAMW * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """State of each matrix: exp_avg, the momentum. Every step is a collective call over the ranks of `wholes`."""

    def __init__(
        self, matrices: Mapping[str, Tensor], wholes: Wholes, *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(list(matrices.values()), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._names = {matrix: name for name, matrix in matrices.items()}
        self._wholes = wholes

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix; one without gradient has one of zeros. `closure` is not called."""
        for group in self.param_groups:
            matrices = group["params"]
            gradients = [torch.zeros_like(m) if m.grad is None else m.grad for m in matrices]
            momenta = [self.state[m]["exp_avg"] for m in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
            updates = {self._names[matrix]: update for matrix, update in zip(matrices, ahead, strict=True)}
            made = self._wholes.transform(updates, _update)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, [made[self._names[m]] for m in matrices], alpha=-group["lr"])


def _update(matrices_NRC: Tensor) -> Tensor:
    return orthogonalised(matrices_NRC) * scale_of(*matrices_NRC.shape[-2:])
