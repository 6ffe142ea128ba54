"""The optimizer over this rank's shards. Elementwise rules need no communication; muon's matrices are put together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain_api.spec import DecidedOptimizer, OptimizerName
from llmtrain_trainer.optim.lion import Lion
from llmtrain_trainer.optim.muon import Muon
from llmtrain_trainer.parallel.pieces import Piece
from llmtrain_trainer.parallel.wholes import Wholes

MOMENTS: Mapping[OptimizerName, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "muon": ("exp_avg",),
}


class ShardedOptimizer:
    """The named rule on plain local tensors, which costs a tenth of the same on DTensors in small steps.

    Matrices are decayed; norms' scales (and every other vector) are not.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        pieces: Mapping[str, Piece],
        options: DecidedOptimizer,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make the rule, and its state of zeros. For muon a collective call over `group`.

        Args:
            shards: what is moved, in place, by name.
            pieces: which part of the whole parameters they are.
            options: of the rule.
            group: ranks that hold one copy of these parameters together; None: this one alone.
            dtype: in which muon computes.
        """
        self.pieces = pieces
        self.name = options.name
        self.shards = dict(shards)
        self.rules = {name: rule_of(options.name, name, pieces[name]) for name in shards}
        self._inner = self._make(options, group, dtype)
        for inner in self._inner:
            for shard in (shard for one in inner.param_groups for shard in one["params"]):
                inner.state[shard] = {}
        for name, shard in self.shards.items():  # made now, so that a checkpoint can be loaded into it
            state = self._state(name)
            state |= {moment: torch.zeros_like(shard) for moment in MOMENTS[self.rules[name]]}
            if self.rules[name] == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return what the rule remembers of a parameter: shards as the parameter's own, in the live memory."""
        state = self._state(name)
        return {moment: state[moment] for moment in MOMENTS[self.rules[name]]}

    def set_steps_done(self, steps: int) -> None:
        """Tell the rule how many steps its moments have seen."""
        for name in self.shards:
            if "step" in (state := self._state(name)):
                state["step"].fill_(steps)

    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update the shards that have a gradient. For muon a collective call."""
        for name, gradient in gradients.items():
            self.shards[name].grad = gradient
        for inner in self._inner:
            for group in inner.param_groups:
                group["lr"] = learning_rate
            inner.step()
        for name in gradients:
            self.shards[name].grad = None

    def _state(self, name: str) -> dict[str, Tensor]:
        shard = self.shards[name]
        state: dict[str, Tensor] = next(inner.state[shard] for inner in self._inner if shard in inner.state)
        return state

    def _make(
        self, options: DecidedOptimizer, group: dist.ProcessGroup | None, dtype: torch.dtype
    ) -> list[torch.optim.Optimizer]:
        rate, betas = options.learning_rate, (options.beta1, options.beta2)
        matrices = {name: shard for name, shard in self.shards.items() if self.rules[name] == "muon"}
        others = [shard for name, shard in self.shards.items() if name not in matrices]
        groups: list[dict[str, object]] = [
            {"params": [shard for shard in others if shard.ndim >= 2], "weight_decay": options.weight_decay},
            {"params": [shard for shard in others if shard.ndim < 2], "weight_decay": 0.0},
        ]
        if options.name == "lion":
            return [Lion(groups, lr=rate, betas=betas)]
        adamw = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=options.epsilon, fused=True)
        if options.name == "adamw" or not matrices:
            return [adamw]
        wholes = Wholes({name: self.pieces[name] for name in matrices}, group, dtype)
        momentum, decay = options.momentum, options.weight_decay
        return [Muon(matrices, wholes, lr=rate, momentum=momentum, weight_decay=decay), adamw]


def rule_of(asked: OptimizerName, name: str, piece: Piece) -> OptimizerName:
    """Return the rule for a parameter. Muon moves matrices inside layers, not the two ends of the model."""
    inside = name.startswith("layers.") and len(piece.shape) >= 2
    return "adamw" if asked == "muon" and not inside else asked
