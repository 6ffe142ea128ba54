"""A mixture of experts against the textbook: one token and one expert at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from llmtrain_api.presets import ModelDimensions, MoeDimensions
from llmtrain_trainer.model.moe import MixtureOfExperts, Router
from llmtrain_trainer.model.transformer import FeedForward, Transformer, loss_sum, rotary_tables
from llmtrain_trainer.parallel.apply import initialise
from llmtrain_trainer.parallel.pieces import whole_of
from llmtrain_trainer.parallel.recompute import Recompute, recompute

B, L, D, X = 2, 12, 16, 6


def _mixture(seed: int = 0, shared: bool = False, **more: float) -> MixtureOfExperts:
    moe = MoeDimensions(experts=X, top_k=2, ffn_dim=8).model_copy(update=more)
    torch.manual_seed(seed)
    mixture = MixtureOfExperts(D, moe, FeedForward(D, 8) if shared else None)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    mixture.router.reset()
    return mixture


def _tokens(seed: int = 1) -> torch.Tensor:
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(seed))


def _textbook(mixture: MixtureOfExperts, x: torch.Tensor, capacity: int) -> torch.Tensor:
    out = torch.zeros_like(x)
    for b in range(B):
        taken = [0] * X
        for t in range(L):
            token = x[b, t]
            chances = (mixture.router.weight @ token).softmax(0)
            best = sorted(range(X), key=lambda e: -float(chances[e] + mixture.router.bias[e]))[
                : mixture.router.moe.top_k
            ]
            total = sum(chances[e] for e in best) if len(best) > 1 else 1.0
            for e in best:
                taken[e] += 1
                if taken[e] <= capacity:
                    gate, up, down = (m.weight[e] for m in mixture.experts.children())
                    out[b, t] += chances[e] / total * (down @ (functional.silu(gate @ token) * (up @ token)))
            if mixture.shared is not None:
                out[b, t] += mixture.shared(token)
    return out


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_it_is_the_weighted_sum_of_the_chosen_experts(top_k: int, shared: bool) -> None:
    mixture, x = _mixture(shared=shared, top_k=top_k), _tokens()
    with torch.no_grad():
        torch.testing.assert_close(mixture(x), _textbook(mixture, x, capacity=L), atol=1e-5, rtol=1e-5)
    assert mixture.router.choices.sum() == B * L * top_k


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 100.0])
def test_an_expert_takes_the_first_tokens_of_a_sequence_up_to_its_capacity(factor: float) -> None:
    mixture, x = _mixture(capacity_factor=factor), _tokens()
    capacity = math.ceil(factor * L * 2 / X)
    with torch.no_grad():
        found = mixture(x)
        torch.testing.assert_close(found, _textbook(mixture, x, capacity), atol=1e-5, rtol=1e-5)
        changed = x.clone()
        changed[:, -1] = 3.0  # who comes last takes nobody's place
        torch.testing.assert_close(mixture(changed)[:, :-1], found[:, :-1], atol=1e-6, rtol=1e-5)


def test_one_token_that_nobody_else_is_with() -> None:
    mixture = _mixture()
    x = _tokens()[:1, :1]
    assert torch.isfinite(mixture(x)).all()
    assert mixture.router.choices.sum() == 2 and (mixture.router.choices == 0).sum() == X - 2


def test_the_bias_decides_who_is_chosen_but_not_the_weight() -> None:
    mixture, x = _mixture(bias_rate=0.5), _tokens()
    for _ in range(3):
        mixture.router.balance(torch.tensor([0, 10, 10, 10, 10, 10]))
    assert mixture.router.bias.tolist() == pytest.approx([1.5, -1.5, -1.5, -1.5, -1.5, -1.5])
    with torch.no_grad():
        routing = mixture.router(x)
        assert (routing.experts == 0).any(dim=-1).all(), "a bias of more than 1 outdoes every chance"
        torch.testing.assert_close(mixture(x), _textbook(mixture, x, capacity=L), atol=1e-5, rtol=1e-5)


def test_the_losses_ride_on_the_output_with_the_gradient_of_their_formula() -> None:
    mixture, x = _mixture(balance_coefficient=0.3, z_coefficient=0.2), _tokens()
    router = mixture.router
    router.balance(torch.tensor([5, 1, 1, 1, 1, 1]))
    router.loss_scale = 1.0 / (B * L)
    (mixture(x).sum() * 0.0).backward()
    found = router.weight.grad
    logits = x.flatten(0, 1) @ router.weight.T
    balance = X * (logits.softmax(-1).mean(0) * torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])).sum()
    z = logits.logsumexp(-1).square().mean()
    (expected,) = torch.autograd.grad(0.3 * balance + 0.2 * z, router.weight)
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)
    step = router.weight.detach() - 0.1 * expected
    after = (x.flatten(0, 1) @ step.T).softmax(-1).mean(0)[0]
    assert after < logits.softmax(-1).mean(0)[0], "the busy expert becomes less likely"


def test_an_even_load_pulls_nowhere() -> None:
    router: Router = _mixture(z_coefficient=0.0, balance_coefficient=1.0).router
    router(_tokens()).weights.sum().mul(0.0).backward()
    assert router.weight.grad is not None and router.weight.grad.abs().max() < 1e-6


DIMS = ModelDimensions(
    dim=64,
    layers=3,
    heads=4,
    kv_heads=2,
    ffn_dim=192,
    vocab_size=320,
    sequence_length=64,
    moe=MoeDimensions(experts=4, top_k=2, ffn_dim=64, every_n_layers=2),
)


def _run(kind: Recompute) -> tuple[float, list[torch.Tensor], list[int]]:
    model = Transformer(DIMS)
    parameters = dict(model.named_parameters())
    initialise(parameters, {n: whole_of(p) for n, p in parameters.items()}, layers=DIMS.layers, seed=1)
    for mixture in model.mixtures().values():
        mixture.router.reset()
    recompute(model, kind)
    tokens = torch.arange(2 * 65).remainder(320).view(2, 65)
    total = loss_sum(model(tokens[:, :-1], rotary_tables(DIMS, torch.device("cpu"))), tokens[:, 1:])
    total.backward()
    [mixture] = model.mixtures().values()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(parameters)
    return total.item(), gradients, mixture.router.choices.tolist()


def test_recomputation_changes_no_bit_and_counts_no_choice_twice() -> None:
    loss, gradients, choices = _run("none")
    assert sum(choices) == 2 * 64 * 2
    for kind in ("selective", "full"):
        again, others, counted = _run(kind)
        assert (again, counted) == (loss, choices)
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_a_choice_is_kept_for_the_repetition_not_made_again() -> None:
    model = Transformer(DIMS)
    parameters = dict(model.named_parameters())
    initialise(parameters, {n: whole_of(p) for n, p in parameters.items()}, layers=DIMS.layers, seed=1)
    [mixture] = model.mixtures().values()
    mixture.router.reset()
    seen: list[torch.Tensor] = []
    mixture.router.register_forward_hook(lambda _, __, routing: seen.append(routing.experts))
    recompute(model, "full")
    tokens = torch.arange(65).remainder(320).view(1, 65)
    total = loss_sum(model(tokens[:, :-1], rotary_tables(DIMS, torch.device("cpu"))), tokens[:, 1:])
    with torch.no_grad():
        mixture.router.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
        mixture.router.weight.mul_(-1)  # as bad as rounding can be: now it would choose others
    total.backward()
    first, again = seen
    assert torch.equal(first, again)
