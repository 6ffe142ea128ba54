from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmtrain_trainer.optim.muon import Muon, orthogonalised, scale_of
from llmtrain_trainer.parallel.pieces import Piece
from llmtrain_trainer.parallel.wholes import Wholes

RATE, MOMENTUM, DECAY = 0.02, 0.95, 0.1


def _alone(*tensors: Tensor) -> tuple[dict[str, Tensor], Wholes]:
    named = {f"layers.{number}.w": tensor for number, tensor in enumerate(tensors)}
    pieces = {name: Piece(tuple(t.shape), (0,) * t.ndim, tuple(t.shape), 1) for name, t in named.items()}
    return named, Wholes(pieces, None, tensors[0].dtype)


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48), (1, 8)])
def test_singular_values_become_alike_and_their_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    made = orthogonalised(matrix.unsqueeze(0))[0]
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.65 and values.max() < 1.25
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    rotated = left.mT @ made @ right.mT
    assert torch.allclose(rotated, torch.diag(rotated.diagonal()), atol=1e-9)


def test_steps_are_those_of_jordans_program_at_the_size_of_adamws() -> None:
    """Ten lines written down anew from Jordan et al. 2024, with the scale of Liu et al. 2025 (section 2.2)."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(12, 8, generator=generator)
    weight, mine = start.double(), start.clone()
    matrices, wholes = _alone(mine)
    optimizer = Muon(matrices, wholes, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    optimizer.state[mine]["exp_avg"] = torch.zeros_like(mine)
    buffer = torch.zeros_like(weight)
    for _ in range(6):
        gradient = torch.randn(12, 8, generator=generator)
        mine.grad = gradient.clone()
        optimizer.step()
        buffer = MOMENTUM * buffer + (1 - MOMENTUM) * gradient.double()
        x = ((1 - MOMENTUM) * gradient.double() + MOMENTUM * buffer).T
        x = x / x.norm()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        weight = weight * (1 - RATE * DECAY) - RATE * 0.2 * math.sqrt(12) * x.T
        assert torch.allclose(mine.double(), weight, atol=1e-5)


def test_an_update_has_the_size_that_adamws_have() -> None:
    update = orthogonalised(torch.randn(1, 256, 64)) * scale_of(256, 64)
    assert 0.15 < update.square().mean().sqrt() < 0.25


def test_stacked_matrices_are_as_many_single_ones() -> None:
    stack = torch.randn(3, 6, 4)
    named, wholes = _alone(stack)
    [together] = wholes.transform(named, orthogonalised).values()
    for number in range(3):
        named, wholes = _alone(stack[number])
        [single] = wholes.transform(named, orthogonalised).values()
        assert torch.allclose(together[number], single, atol=1e-5)


def test_what_has_no_gradient_moves_by_its_momentum_alone() -> None:
    still = torch.ones(4, 4)
    matrices, wholes = _alone(still)
    optimizer = Muon(matrices, wholes, lr=RATE, momentum=MOMENTUM, weight_decay=0.0)
    optimizer.state[still]["exp_avg"] = torch.zeros_like(still)
    optimizer.step()
    assert torch.equal(still, torch.ones(4, 4))
