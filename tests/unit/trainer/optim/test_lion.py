from __future__ import annotations

import torch

from llmtrain_trainer.optim.lion import Lion

RATE, BETA1, BETA2, DECAY = 0.01, 0.9, 0.99, 0.1


def test_ten_steps_are_those_of_the_papers_program() -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    parameter = weight.clone().requires_grad_()
    optimizer = Lion([parameter], lr=RATE, betas=(BETA1, BETA2), weight_decay=DECAY)
    momentum = torch.zeros_like(weight)
    for _ in range(10):
        gradient = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(BETA1 * momentum + (1 - BETA1) * gradient)
        weight = weight - RATE * (update + DECAY * weight)
        momentum = BETA2 * momentum + (1 - BETA2) * gradient
        assert torch.allclose(parameter.detach(), weight, rtol=0, atol=1e-12)
    assert torch.allclose(optimizer.state[parameter]["exp_avg"], momentum, rtol=0, atol=1e-12)


def test_what_has_no_gradient_stays_as_it_is() -> None:
    still, moved = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    moved.grad = torch.ones(3)
    Lion([still, moved], lr=RATE, betas=(BETA1, BETA2), weight_decay=DECAY).step()
    assert torch.equal(still, torch.ones(3)) and not torch.equal(moved, torch.ones(3))
