"""What all ranks have to agree on about routers: how often each expert was chosen in the step that ends."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.model.transformer import Transformer


class Routing:
    """The routers of this rank's layers, without history at first. A dense model has none, and nothing is done."""

    def __init__(self, stages: Iterable[Transformer], config: RunConfig) -> None:
        dims = config.dimensions
        self._layers = dims.expert_layers()
        self._experts = dims.moe.experts if dims.moe else 0
        self._device = config.device
        self._copies = config.shape.tp
        """Ranks that route the same tokens."""
        self._routers = {number: mixture.router for stage in stages for number, mixture in stage.mixtures().items()}
        self._tokens_per_step = config.tokens_per_step
        for router in self._routers.values():
            router.reset()

    def scale_losses(self, scale: float) -> None:
        """Have the routers' losses multiplied as the model's own is: means over the global batch, times `scale`."""
        for router in self._routers.values():
            router.loss_scale = scale / (self._tokens_per_step * self._copies)

    def take_choices(self) -> Tensor:
        """Return this rank's share of the step's choices, float64 [layers with experts x experts], and forget them.

        Summed over all ranks, they are the choices of the whole global batch.
        """
        choices = torch.zeros(len(self._layers), self._experts, dtype=torch.float64, device=self._device)
        for row, number in enumerate(self._layers):
            if router := self._routers.get(number):
                choices[row] = router.choices / self._copies
                router.choices.zero_()
        return choices.flatten()

    def balance(self, choices: Tensor) -> float | None:
        """Give every router the choices of the whole global batch, as `take_choices` lays them out.

        Returns:
            The load of the busiest expert of any layer, as a multiple of its even share; None of a dense model.
        """
        if not self._layers:
            return None
        by_layer = choices.view(len(self._layers), self._experts)
        for row, number in zip(by_layer, self._layers, strict=True):
            if router := self._routers.get(number):
                router.balance(row)
        shares = by_layer / by_layer.sum(dim=1, keepdim=True).clamp(min=1)
        return float(shares.max()) * self._experts

    def tensors(self) -> dict[str, Tensor]:
        """Return what routers remember from step to step, by name; the live memory, whole on every rank that has it."""
        return {
            f"model.layers.{number}.feed_forward.router.{name}": tensor
            for number, router in self._routers.items()
            for name, tensor in (("load", router.load), ("bias", router.bias))
        }
