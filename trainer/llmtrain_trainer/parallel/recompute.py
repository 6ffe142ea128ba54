"""Activation recomputation: what a layer's forward is not allowed to keep, its backward computes again.

`full` keeps a layer's input alone. `selective` also keeps what was expensive, the results of matrix products and of
attention, and computes again what is cheap and large: norms, rotations, gates (Korthikanti et al. 2022,
arXiv:2205.05198). Neither changes a bit of the loss: the same operations run on the same values.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmtrain_trainer.model.transformer import Transformer

Recompute = Literal["none", "selective", "full"]

_ATEN = torch.ops.aten
EXPENSIVE = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


def recompute(model: Transformer, kind: Recompute) -> None:
    """Wrap every layer's forward in place. Goes before FSDP, whose hooks must run once and outside."""
    if kind == "none":
        return
    contexts = {} if kind == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    for block in model.blocks():
        _wrap(block, contexts)


def _wrap(module: nn.Module, contexts: dict[str, Any]) -> None:
    # No random numbers are drawn in a layer, so there is no state of a generator to keep. Setting the instance's
    # forward, not a wrapper module, leaves the names of parameters as they are.
    again = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **contexts)
    module.forward = again


def _policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
