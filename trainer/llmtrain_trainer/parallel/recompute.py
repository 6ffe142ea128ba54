"""Activation recomputation: what a layer's forward is not allowed to keep, its backward computes again.

`full` keeps a layer's input alone. `selective` also keeps what was expensive, the results of matrix products and of
attention, and computes again what is cheap and large: norms, rotations, gates (Korthikanti et al. 2022,
arXiv:2205.05198). Neither changes a bit of the loss: the same operations run on the same values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmtrain_trainer.model.moe import Memory, MixtureOfExperts, Router
from llmtrain_trainer.model.transformer import Transformer

Recompute = Literal["none", "selective", "full"]

_ATEN = torch.ops.aten
EXPENSIVE = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


def recompute(model: Transformer, kind: Recompute) -> None:
    """Wrap layers' forward in place. Goes before FSDP, whose hooks must run once and outside of what is repeated.

    A router's choice is kept whatever the kind, not made again: a kernel that rounds otherwise the second time would
    send a token elsewhere.
    """
    if kind == "none":
        return
    selective = partial(create_selective_checkpoint_contexts, _policy)
    for block in model.blocks():
        mixture = block.feed_forward if isinstance(block.feed_forward, MixtureOfExperts) else None
        if kind == "full":
            _wrap(block, partial(_remembering, mixture.router) if mixture else _nothing_special)
        elif mixture is None:
            _wrap(block, selective)
        else:  # experts can be sharded on their own, and what keeps results cannot see through FSDP's hooks
            _wrap(block.attention, selective)
            _wrap(mixture.experts, selective)


def _wrap(module: nn.Module, context_fn: Any) -> None:
    # No random numbers are drawn in a layer, so there is no state of a generator to keep. Setting the instance's
    # forward, not a wrapper module, leaves the names of parameters as they are.
    again = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)
    module.forward = again


class _Remembering:
    """While it is entered, a router's choice is written down, or, if it was, read."""

    def __init__(self, router: Router, memory: Memory) -> None:
        self._router, self._memory = router, memory

    def __enter__(self) -> None:
        self._router.memory = self._memory

    def __exit__(self, *_: object) -> None:
        self._router.memory = None


def _remembering(router: Router) -> tuple[_Remembering, _Remembering]:
    """Return what surrounds a layer's forward, and what surrounds each repetition of it."""
    memory = Memory()
    return _Remembering(router, memory), _Remembering(router, memory)


def _nothing_special() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), nullcontext()


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
