"""Which steps are skipped, what is remembered of them, and when enough is enough."""

from __future__ import annotations

import math
import random

import pytest

from llmtrain_api.spec import LossScale, Skipping, Training
from llmtrain_trainer.errors import NumericsError
from llmtrain_trainer.optim.guard import MIN_HISTORY, WINDOW, StepGuard
from llmtrain_trainer.optim.loss_scale import LossScaler


def _guard(precision: str = "fp32", **settings: int | float) -> StepGuard:
    scale = {k: v for k, v in settings.items() if k in LossScale.model_fields}
    skipping = {k: v for k, v in settings.items() if k in Skipping.model_fields}
    training = Training(steps=1, precision=precision, loss_scale=LossScale(**scale), skipping=Skipping(**skipping))  # type: ignore[arg-type]
    return StepGuard(training)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)])
def test_what_is_not_finite_is_skipped_until_there_are_too_many_in_a_row(loss: float, norm: float) -> None:
    guard = _guard(max_in_a_row=2)
    for _ in range(3):
        assert guard.reason_to_skip(1, 2.0, 1.0) == ""
        assert "not finite" in guard.reason_to_skip(2, loss, norm)
        assert "not finite" in guard.reason_to_skip(3, loss, norm)
    assert guard.skipped == 6
    with pytest.raises(NumericsError, match=r"step 4: .* not finite after 2 skipped steps in a row"):
        guard.reason_to_skip(4, loss, norm)


def test_none_may_be_skipped() -> None:
    with pytest.raises(NumericsError, match=r"step 7: loss nan, gradient norm 1.0: not finite$"):
        _guard(max_in_a_row=0).reason_to_skip(7, math.nan, 1.0)


def test_a_spike_is_skipped_once_there_is_a_history() -> None:
    chance, guard = random.Random(1), _guard(spike_sigmas=6.0)
    for step in range(MIN_HISTORY - 1):
        assert guard.reason_to_skip(step, chance.gauss(3.0, 0.1), chance.gauss(1.0, 0.1)) == ""
    assert guard.reason_to_skip(40, 30.0, 1.0) == "", "too early to say"
    guard = _guard(spike_sigmas=6.0)
    for step in range(3 * WINDOW):
        assert guard.reason_to_skip(step, chance.gauss(3.0, 0.1), chance.gauss(1.0, 0.1)) == ""
    assert "loss 30 is more than 6 standard deviations above its last 128 steps" in guard.reason_to_skip(1, 30.0, 1.0)
    assert "gradient norm 9 is more than" in guard.reason_to_skip(2, 3.0, 9.0)
    assert guard.reason_to_skip(3, 0.1, 0.1) == "", "what falls is no spike"
    assert guard.skipped == 2
    assert _guard().reason_to_skip(3, 1e9, 1e9) == ""


def test_what_it_remembers_makes_another_guard_judge_alike() -> None:
    chance, first, second = random.Random(2), _guard(spike_sigmas=3.0), _guard(spike_sigmas=3.0)
    numbers = [(chance.gauss(3.0, 0.2), chance.gauss(1.0, 0.2)) for _ in range(400)]
    numbers[200] = numbers[300] = (9.0, 1.0)
    for step, pair in enumerate(numbers[:150]):
        first.reason_to_skip(step, *pair)
    for name, tensor in first.tensors().items():
        second.tensors()[name].copy_(tensor)
    rest = [guard.reason_to_skip(0, *pair) for pair in numbers[150:] for guard in (first, second)]
    assert rest[::2] == rest[1::2]
    assert any(rest) and first.skipped == second.skipped


def test_fp16_halves_its_scale_after_some_overflows_and_doubles_it_after_peace() -> None:
    guard = _guard("fp16", initial=1024, hysteresis=2, growth_steps=5, max_in_a_row=0)
    scales = []
    for norm in (math.inf, math.inf, math.inf, *([1.0] * 5), math.nan, math.nan):
        guard.reason_to_skip(1, 2.0, norm)
        scales.append(guard.scaler.scale)
    assert scales == [1024, 512, 256, 256, 256, 256, 256, 512, 512, 256]
    assert guard.skipped == 5, "an overflow does not count towards the row"


def test_a_scale_that_cannot_fall_says_what_to_do() -> None:
    guard = _guard("fp16", initial=2, minimum=1, hysteresis=1)
    guard.reason_to_skip(1, 2.0, math.inf)
    with pytest.raises(NumericsError, match=r"training.lossScale.minimum \(1\); fix: set training.precision to bf16"):
        guard.reason_to_skip(2, 2.0, math.inf)


def test_other_precisions_have_a_scale_of_one() -> None:
    guard = _guard("bf16")
    for _ in range(5000):
        guard.scaler.went_well()
    assert guard.scaler.scale == 1.0 == LossScaler(None).scale
