"""AdamW (Loshchilov and Hutter 2019) over this rank's shards: an elementwise rule needs no communication."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from llmtrain_api.spec import Optimizer
from llmtrain_trainer.parallel.pieces import Piece, local_of


class ShardedAdamW:
    """torch's fused AdamW on plain local tensors, which costs a tenth of the same on DTensors in small steps.

    Matrices are decayed; norms' scales (and every other vector) are not.
    """

    def __init__(self, model: nn.Module, pieces: Mapping[str, Piece], options: Optimizer) -> None:
        self.pieces = pieces
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.shards: dict[str, Tensor] = {n: local_of(p.detach()) for n, p in self.parameters.items()}
        decayed = [self.shards[n] for n, p in self.parameters.items() if p.ndim >= 2]
        others = [self.shards[n] for n, p in self.parameters.items() if p.ndim < 2]
        self.inner = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.epsilon,
            fused=True,
        )
        for shard in self.shards.values():
            self.inner.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of every gradient by name, in the order of the model's parameters."""
        return {name: local_of(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients, and forget the gradients."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        for name, parameter in self.parameters.items():
            self.shards[name].grad = None if parameter.grad is None else local_of(parameter.grad)
        self.inner.step()
        for name, parameter in self.parameters.items():
            self.shards[name].grad = None
            parameter.grad = None
