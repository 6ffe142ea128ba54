"""When a step's split is off, and what is said then."""

from __future__ import annotations

import pytest

from llmtrain_trainer.metrics.balance import AGAIN_STEPS, IDEAL, WARM_UP_STEPS, Balance, advice, shares

BESIDE_NOTHING = {"optimizer": 0.0, "report": 0.0, "checkpoint": 0.0}


def _split(data: float, forward: float, backward: float, sync: float, **beside: float) -> dict[str, float]:
    return {"data_loading": data, "forward": forward, "backward": backward, "sync_wait": sync, **beside}


@pytest.mark.parametrize(
    ("split", "part", "words"),
    [
        pytest.param(IDEAL, "", "", id="the ideal"),
        pytest.param(_split(0.0, 1.0, 2.0, 0.0), "", "", id="backward twice forward, nothing else"),
        pytest.param(_split(0.01, 1.0, 2.0, 0.3), "", "", id="a tenth of waiting"),
        pytest.param(
            _split(2.0, 1.0, 2.0, 0.1), "data_loading", "data_loading takes 39% of a step, ideally 15%", id="data"
        ),
        pytest.param(_split(0.0, 1.0, 2.0, 1.0), "sync_wait", "slow worker or network", id="waiting"),
        pytest.param(_split(0.0, 1.0, 3.2, 0.0), "backward", "parallelism.recompute", id="layers computed again"),
        pytest.param(_split(0.0, 2.0, 0.8, 0.0), "forward", "microBatchSize", id="forward alone"),
        pytest.param(_split(0.0, 1.0, 2.0, 0.0, optimizer=1.0), "optimizer", "25% of a step, at most 15%", id="update"),
        pytest.param(_split(0.0, 1.0, 2.0, 0.0, checkpoint=0.5), "checkpoint", "checkpoint.pace", id="checkpoints"),
        pytest.param(_split(0.0, 1.0, 2.0, 0.0, report=0.5), "report", "checkpoint.store", id="telling"),
        pytest.param(
            {"data_loading": 1, "pipeline": 1, "sync_wait": 0}, "data_loading", "50%", id="data of a pipeline"
        ),
        pytest.param({"data_loading": 0, "pipeline": 1, "sync_wait": 0}, "", "", id="a pipeline"),
        pytest.param(_split(0.0, 0.0, 0.0, 0.0), "", "", id="no time at all"),
    ],
)
def test_the_part_that_is_most_off_is_named(split: dict[str, float], part: str, words: str) -> None:
    assert advice({**BESIDE_NOTHING, **split})[0] == part
    assert words in advice({**BESIDE_NOTHING, **split})[1]


def test_shares_of_the_ideal_parts_leave_the_others_out() -> None:
    found = shares(_split(0.15, 0.35, 0.45, 0.05, optimizer=1.0))
    assert {part: found[part] for part in IDEAL} == pytest.approx(IDEAL)
    assert found["optimizer"] == 0.5


def test_advice_is_told_once_until_something_else_is_off() -> None:
    balance = Balance()
    slow_data, fine, slow_ranks = _split(2, 1, 2, 0), _split(0, 1, 2, 0), _split(0, 1, 2, 4)
    told = [balance.step(_split(99, 1, 2, 0)) for _ in range(WARM_UP_STEPS)]
    told += [balance.step(slow_data) for _ in range(8 * AGAIN_STEPS)]
    assert sum(told) == 1 and balance.advice.startswith("data_loading")
    assert not any(balance.step(fine) for _ in range(8 * AGAIN_STEPS))
    assert balance.advice == ""
    assert sum(balance.step(slow_ranks) for _ in range(8 * AGAIN_STEPS)) == 1
    assert balance.advice.startswith("sync_wait")


def test_the_first_steps_of_an_attempt_are_not_judged() -> None:
    balance = Balance()
    assert not any(balance.step(_split(9, 1, 2, 0)) for _ in range(WARM_UP_STEPS))
    assert not any(balance.step(_split(0, 1, 2, 0)) for _ in range(4 * AGAIN_STEPS))
