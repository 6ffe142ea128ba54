"""Recomputation on one process: the same bits from less memory."""

from __future__ import annotations

import torch

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.model.transformer import Transformer, loss_sum, rotary_tables
from llmtrain_trainer.parallel.apply import initialise
from llmtrain_trainer.parallel.pieces import whole_of
from llmtrain_trainer.parallel.recompute import Recompute, recompute

DIMS = ModelDimensions(dim=64, layers=4, heads=4, kv_heads=2, ffn_dim=192, vocab_size=320, sequence_length=64)


def _run(kind: Recompute, dtype: torch.dtype = torch.float32) -> tuple[float, list[torch.Tensor], int]:
    """Return loss, gradients, and the bytes that forward kept for backward (parameters aside, each storage once)."""
    model = Transformer(DIMS)
    parameters = dict(model.named_parameters())
    initialise(parameters, {n: whole_of(p) for n, p in parameters.items()}, layers=DIMS.layers, seed=1)
    model.to(dtype)
    recompute(model, kind)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(2 * 65).remainder(320).view(2, 65)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(tokens[:, :-1], rotary_tables(DIMS, torch.device("cpu")))
    total = loss_sum(logits, tokens[:, 1:])
    total.backward()
    return total.item(), [p.grad for p in model.parameters() if p.grad is not None], sum(kept.values())


def test_the_loss_and_every_gradient_are_the_same_to_the_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        loss, gradients, _ = _run("none", dtype)
        for kind in ("selective", "full"):
            again, others, _ = _run(kind, dtype)
            assert again == loss
            assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_less_is_kept() -> None:
    nothing, full = (_run(kind)[2] for kind in ("none", "full"))
    assert full <= 0.6 * nothing, (full, nothing)
