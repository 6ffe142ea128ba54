"""The optimizer over this rank's shards: an elementwise rule needs no communication."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmtrain_api.spec import DecidedOptimizer
from llmtrain_trainer.optim.lion import Lion
from llmtrain_trainer.parallel.pieces import Piece

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


class ShardedOptimizer:
    """The named rule on plain local tensors, which costs a tenth of the same on DTensors in small steps.

    Matrices are decayed; norms' scales (and every other vector) are not.
    """

    def __init__(self, shards: Mapping[str, Tensor], pieces: Mapping[str, Piece], options: DecidedOptimizer) -> None:
        self.pieces = pieces
        self.name = options.name
        self.shards = dict(shards)
        self.inner = _rule(self._groups(options.weight_decay), options)
        for shard in self.shards.values():  # made now, so that a checkpoint can be loaded into it
            state: dict[str, Tensor] = {moment: torch.zeros_like(shard) for moment in MOMENTS[self.name]}
            if self.name == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            self.inner.state[shard] = state

    def _groups(self, weight_decay: float) -> list[dict[str, object]]:
        decayed = [shard for shard in self.shards.values() if shard.ndim >= 2]
        others = [shard for shard in self.shards.values() if shard.ndim < 2]
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return what the rule remembers of a parameter: shards as the parameter's own, in the live memory."""
        state = self.inner.state[self.shards[name]]
        return {moment: state[moment] for moment in MOMENTS[self.name]}

    def set_steps_done(self, steps: int) -> None:
        """Tell the rule how many steps its moments have seen."""
        for state in self.inner.state.values():
            if "step" in state:
                state["step"].fill_(steps)

    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update the shards that have a gradient."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        for name, gradient in gradients.items():
            self.shards[name].grad = gradient
        self.inner.step()
        for name in gradients:
            self.shards[name].grad = None


def _rule(groups: list[dict[str, object]], options: DecidedOptimizer) -> torch.optim.Optimizer:
    rate, betas = options.learning_rate, (options.beta1, options.beta2)
    if options.name == "lion":
        return Lion(groups, lr=rate, betas=betas)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=options.epsilon, fused=True)
