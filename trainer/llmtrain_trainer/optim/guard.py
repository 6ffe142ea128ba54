"""Which steps are not made: those whose loss or gradient is not finite, overflows fp16, or leaps out of its history.

The numbers it judges have been agreed on by all ranks, so all judge alike and nothing more has to be said between them
(ecmwf/WeatherGenerator issue 2724 is what comes of a flag decided on one rank).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmtrain_api.spec import Training
from llmtrain_trainer.errors import NumericsError
from llmtrain_trainer.optim.loss_scale import LossScaler

WINDOW = 128
"""Steps that a spike is compared with."""
MIN_HISTORY = 32
"""Fewer steps than this say too little about what is usual."""


class StepGuard:
    """Judges each step before its update; remembers what it has to."""

    def __init__(self, training: Training) -> None:
        self._skipping = training.skipping
        self.scaler = LossScaler(training.loss_scale if training.precision == "fp16" else None)
        self._scaled = training.precision == "fp16"
        self._counts = torch.zeros(3, dtype=torch.float64)
        """Skipped steps in a row, skipped steps in all, steps made."""
        self._history = torch.zeros(2, WINDOW, dtype=torch.float64)
        """Loss and gradient norm of the last steps made: a ring."""

    @property
    def skipped(self) -> int:
        """Steps skipped since training began."""
        return int(self._counts[1])

    def tensors(self) -> dict[str, Tensor]:
        """Return what a resumed run must know, by name; the live memory, the same on every rank."""
        return {
            "training.guard.counts": self._counts,
            "training.guard.history": self._history,
            "training.loss_scale": self.scaler.state,
        }

    def reason_to_skip(self, step: int, loss: float, norm: float) -> str:
        """Return why a step must not be made, or '' for one that is in order.

        Raises:
            NumericsError: too many in a row, or a loss scale that cannot fall.
        """
        if self._scaled and math.isfinite(loss) and not math.isfinite(norm):
            self._counts[1] += 1
            self.scaler.overflowed()
            return f"gradients overflowed fp16; the loss scale is now {self.scaler.scale:.0f}"
        reason = self._complaint(loss, norm)
        if not reason:
            self._remember(loss, norm)
            self.scaler.went_well()
            return ""
        if self._counts[0] >= self._skipping.max_in_a_row:
            before = f" after {self._skipping.max_in_a_row} skipped steps in a row" if self._counts[0] else ""
            raise NumericsError(f"step {step}: {reason}{before}")
        self._counts[:2] += 1
        return reason

    def _complaint(self, loss: float, norm: float) -> str:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}: not finite"
        sigmas, known = self._skipping.spike_sigmas, min(int(self._counts[2]), WINDOW)
        if sigmas is None or known < MIN_HISTORY:
            return ""
        past = self._history[:, :known]
        limits = past.mean(dim=1) + sigmas * past.std(dim=1)
        for name, value, limit in zip(("loss", "gradient norm"), (loss, norm), limits.tolist(), strict=True):
            if value > limit:
                return f"{name} {value:.6g} is more than {sigmas:g} standard deviations above its last {known} steps"
        return ""

    def _remember(self, loss: float, norm: float) -> None:
        self._history[:, int(self._counts[2]) % WINDOW] = torch.tensor((loss, norm), dtype=torch.float64)
        self._counts[0] = 0
        self._counts[2] += 1
