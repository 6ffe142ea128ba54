"""Which change of a status is written at once, and which waits for the period."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmtrain_api.status import CheckpointStatus, LLMTrainJobStatus, ProgressStatus, RestartsStatus
from llmtrain_api.status_goodput import GoodputStatus
from llmtrain_operator.core.changes import next_write_at, worth_writing
from llmtrain_operator.core.times import to_timestamp
from tests.support.jobs import NOW, make_job, make_observed

WRITTEN = ProgressStatus(
    step=5, steps=100, tokens="5", loss="1.0", tokens_per_second="1.0", updated_at=to_timestamp(NOW)
)
LATER = WRITTEN.model_copy(update={"step": 6})
LEDGER = GoodputStatus(accounted_until=to_timestamp(NOW))
HURT = RestartsStatus(total=2, since_progress={"Crash": 1, "Hang": 1}, by_worker_since_progress={"1": 2})


def written_at_once(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Tell whether the change is written long before the period of the last write is over."""
    status = LLMTrainJobStatus(progress=WRITTEN, **old)
    observed = make_observed(make_job().with_status(status), now=NOW + 0.1)
    return worth_writing(observed, status.model_copy(update={"progress": LATER, **new}))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param({}, {}, id="a step"),
        pytest.param({}, {"goodput": LEDGER}, id="time that was booked"),
        pytest.param({}, {"checkpoint": CheckpointStatus(step=5)}, id="a checkpoint of a job that is well"),
        pytest.param(
            {"restarts": HURT}, {"restarts": HURT.model_copy(update={"since_progress": {"Hang": 1}})}, id="one of two"
        ),
    ],
)
def test_what_only_follows_training_waits(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert not written_at_once(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param({}, {"message": "worker 1 is pending"}, id="a message"),
        pytest.param({"restarts": HURT}, {"restarts": RestartsStatus(total=2)}, id="a job is well again"),
        pytest.param({}, {"restarts": HURT}, id="a restart"),
    ],
)
def test_what_somebody_waits_for_does_not(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert written_at_once(old, new)


def test_progress_is_written_when_its_period_is_over() -> None:
    status = LLMTrainJobStatus(progress=WRITTEN)
    observed = make_observed(make_job().with_status(status))
    due = replace(observed, now=next_write_at(observed))
    new = status.model_copy(update={"progress": LATER})
    assert (worth_writing(observed, new), worth_writing(due, new), worth_writing(due, status)) == (False, True, False)


def test_the_ledger_alone_is_never_written() -> None:
    status = LLMTrainJobStatus(progress=WRITTEN)
    observed = make_observed(make_job().with_status(status), now=NOW + 1000)
    assert not worth_writing(observed, status.model_copy(update={"goodput": LEDGER}))
