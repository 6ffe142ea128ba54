from __future__ import annotations

import math

import pytest

from llmtrain_api.spec import Training
from llmtrain_trainer.optim.schedule import learning_rate


def _training(kind: str = "cosine", steps: int = 100, warmup: int = 10, ratio: float = 0.1) -> Training:
    return Training.model_validate(
        {
            "steps": steps,
            "optimizer": {"learningRate": 1.0},
            "schedule": {"kind": kind, "warmupSteps": warmup, "minLearningRateRatio": ratio},
        }
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.1), (5, 0.5), (10, 1.0), (55, 0.55), (100, 0.1)],
    ids=["first", "half of the warm-up", "peak", "half-way down", "last"],
)
def test_cosine(step: int, expected: float) -> None:
    assert math.isclose(learning_rate(step, _training()), expected)


@pytest.mark.parametrize(("step", "expected"), [(10, 1.0), (55, 0.55), (100, 0.1)])
def test_linear(step: int, expected: float) -> None:
    assert math.isclose(learning_rate(step, _training("linear")), expected)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.1), (10, 1.0), (82, 1.0), (91, 0.55), (100, 0.1)],
    ids=["first", "peak", "last of the stable part", "half of the fall", "last"],
)
def test_wsd(step: int, expected: float) -> None:
    assert math.isclose(learning_rate(step, _training("wsd")), expected)


@pytest.mark.parametrize(("name", "rate"), [("adamw", 3e-4), ("lion", 6e-5)])
def test_the_peak_is_the_rules_own_where_none_is_given(name: str, rate: float) -> None:
    training = Training.model_validate({"steps": 10, "optimizer": {"name": name}, "schedule": {"kind": "constant"}})
    assert learning_rate(5, training) == rate


@pytest.mark.parametrize(("step", "expected"), [(1, 0.1), (10, 1.0), (11, 1.0), (100, 1.0)])
def test_constant(step: int, expected: float) -> None:
    assert math.isclose(learning_rate(step, _training("constant")), expected)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_it_never_rises_after_the_warm_up_nor_falls_below_the_floor(kind: str) -> None:
    rates = [learning_rate(step, _training(kind)) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert min(rates) >= 0.1 - 1e-12


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (5, 5), (5, 50)], ids=["one step", "all warm-up", "cut short"])
def test_edges_are_finite_and_positive(steps: int, warmup: int) -> None:
    assert all(0 < learning_rate(step, _training(steps=steps, warmup=warmup)) <= 1 for step in range(1, steps + 1))
