"""Dynamic loss scaling for fp16: small gradients are lifted out of the range in which fp16 knows only zero.

The loss is multiplied by the scale before backward, and the gradients are divided by it after their reduction in fp32.
A step whose gradients overflow is skipped by all ranks, because all see the same global norm: no flag of its own has to
be agreed on. Source: Micikevicius et al. 2018 (arXiv:1710.03740); hysteresis as in Megatron-LM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain_api.spec import LossScale
from llmtrain_trainer.errors import NumericsError


class LossScaler:
    """The scale and its history; without settings it is 1 and stays so."""

    def __init__(self, settings: LossScale | None) -> None:
        self._settings = settings
        initial = (settings.initial, 0, settings.hysteresis) if settings else (1, 0, 0)
        self.state: Tensor = torch.tensor(initial, dtype=torch.float64)
        """Scale, steps since it last changed, overflows that it may still ignore. Part of the training state."""

    @property
    def scale(self) -> float:
        return float(self.state[0])

    def overflowed(self) -> None:
        """Take note of gradients that were not finite.

        Raises:
            NumericsError: the scale cannot fall any further.
        """
        assert self._settings is not None
        scale, _, left = self.state.tolist()
        if left <= 1 and scale <= self._settings.minimum:
            raise NumericsError(
                f"gradients overflow fp16 at training.lossScale.minimum ({self._settings.minimum}); fix: set "
                "training.precision to bf16, or lower training.optimizer.learningRate"
            )
        if left <= 1:
            scale = max(float(self._settings.minimum), scale / 2)
        self.state.copy_(torch.tensor((scale, 0, max(0, left - 1))))

    def went_well(self) -> None:
        """Take note of a step with finite gradients."""
        if self._settings is None:
            return
        scale, steps, left = self.state.tolist()
        steps += 1
        if steps >= self._settings.growth_steps:
            scale, steps, left = scale * 2, 0, self._settings.hysteresis
        self.state.copy_(torch.tensor((scale, steps, left)))
