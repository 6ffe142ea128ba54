"""The optimizer over this rank's shards: an elementwise rule needs no communication."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from llmtrain_api.spec import DecidedOptimizer
from llmtrain_trainer.optim.lion import Lion
from llmtrain_trainer.parallel.pieces import Piece, local_of

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


class ShardedOptimizer:
    """The named rule on plain local tensors, which costs a tenth of the same on DTensors in small steps.

    Matrices are decayed; norms' scales (and every other vector) are not.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], pieces: Mapping[str, Piece], options: DecidedOptimizer
    ) -> None:
        self.pieces = pieces
        self.name = options.name
        self.parameters = dict(parameters)
        self.shards: dict[str, Tensor] = {n: local_of(p.detach()) for n, p in self.parameters.items()}
        self.inner = _rule(self._groups(options.weight_decay), options)
        for shard in self.shards.values():  # made now, so that a checkpoint can be loaded into it
            state: dict[str, Tensor] = {moment: torch.zeros_like(shard) for moment in MOMENTS[self.name]}
            if self.name == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            self.inner.state[shard] = state

    def _groups(self, weight_decay: float) -> list[dict[str, object]]:
        decayed = [self.shards[n] for n, p in self.parameters.items() if p.ndim >= 2]
        others = [self.shards[n] for n, p in self.parameters.items() if p.ndim < 2]
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of every gradient by name, in the order of the model's parameters."""
        return {name: local_of(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return what the rule remembers of a parameter: shards as the parameter's own, in the live memory."""
        state = self.inner.state[self.shards[name]]
        return {moment: state[moment] for moment in MOMENTS[self.name]}

    def set_steps_done(self, steps: int) -> None:
        """Tell the rule how many steps its moments have seen."""
        for state in self.inner.state.values():
            if "step" in state:
                state["step"].fill_(steps)

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients, and forget the gradients."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        for name, parameter in self.parameters.items():
            self.shards[name].grad = None if parameter.grad is None else local_of(parameter.grad)
        self.inner.step()
        self.forget()

    def forget(self) -> None:
        """Let go of the gradients."""
        for name, parameter in self.parameters.items():
            self.shards[name].grad = None
            parameter.grad = None


def _rule(groups: list[dict[str, object]], options: DecidedOptimizer) -> torch.optim.Optimizer:
    rate, betas = options.learning_rate, (options.beta1, options.beta2)
    if options.name == "lion":
        return Lion(groups, lr=rate, betas=betas)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=options.epsilon, fused=True)
