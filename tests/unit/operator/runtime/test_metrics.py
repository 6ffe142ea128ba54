"""What the operator's metrics say of jobs: by the statuses that `plan` writes, and at the moment of a scrape."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmtrain_api.constants import TERMINAL_STATES, Action, ConditionType, FailureClass, GoodputPart, State
from llmtrain_api.status import FailureStatus, LLMTrainJobStatus
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.times import to_timestamp
from llmtrain_operator.runtime.backend import JobKey
from llmtrain_operator.runtime.job_metrics import STEPPING, JobGauges
from llmtrain_operator.runtime.metrics import Metrics

KEY, OTHER = JobKey("lab", "demo"), JobKey("lab", "other")
NOW = 1_800_000_000.0


class House:
    """Metrics with a clock and agents of the test's own."""

    def __init__(self, each_job: bool = False) -> None:
        self.now = NOW
        self.silent: dict[JobKey, list[float]] = {}
        jobs = JobGauges(each_job=each_job, clock=lambda: self.now)
        jobs.watch(lambda: self.silent)
        self.metrics = Metrics(jobs)

    def decide(self, key: JobKey, before: LLMTrainJobStatus, after: LLMTrainJobStatus | None = None) -> None:
        plan = Plan(status=after or before, status_changed=after is not None)
        self.metrics.decided(key, before, plan)

    def value(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.metrics.exposition().decode()):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return None


def _status(state: State, begun: float = NOW - 1000, **fields: Any) -> LLMTrainJobStatus:
    defaults = {"state": state, "attempt": 1, "start_time": to_timestamp(begun)}
    return LLMTrainJobStatus.model_validate({**defaults, **fields})


def _progress(at: float) -> dict[str, Any]:
    return {
        **{"step": 40, "steps": 100, "tokens": "400", "loss": "2.5", "tokens_per_second": "123.5"},
        "updated_at": to_timestamp(at),
    }


def _failure(**fields: Any) -> FailureStatus:
    defaults: dict[str, Any] = {"at": to_timestamp(NOW), "attempt": 1, "failure_class": FailureClass.NODE_LOST}
    return FailureStatus.model_validate({**defaults, "message": "m", "action": Action.REPLACE_NODE, **fields})


def test_jobs_are_counted_by_state_and_forgotten() -> None:
    house = House()
    house.decide(KEY, LLMTrainJobStatus(), _status(State.PENDING))
    house.decide(OTHER, _status(State.TRAINING))
    assert house.value("llmtrain_jobs", state="Pending") == 1
    assert house.value("llmtrain_jobs", state="Training") == 1
    house.decide(KEY, _status(State.PENDING), _status(State.TRAINING))
    assert house.value("llmtrain_jobs", state="Training") == 2
    house.metrics.forgotten(KEY)
    house.metrics.forgotten(OTHER)
    assert all(house.value("llmtrain_jobs", state=state.value) == 0 for state in State)


def test_a_recovery_is_counted_once_when_its_cost_becomes_known() -> None:
    house = House()
    broken = _status(State.RESTARTING, failures=[_failure()])
    mended = _status(State.TRAINING, failures=[_failure(seconds_to_next_step="12.50", lost_steps=7)])
    house.decide(KEY, _status(State.TRAINING), broken)
    assert house.value("llmtrain_failures_total", **{"class": "NodeLost", "action": "ReplaceNode"}) == 1
    assert house.value("llmtrain_recovery_seconds_count", **{"class": "NodeLost"}) == 0
    house.decide(KEY, broken, mended)
    house.decide(KEY, mended)
    house.decide(KEY, mended, mended.model_copy(update={"message": "more"}))
    assert house.value("llmtrain_recovery_seconds_count", **{"class": "NodeLost"}) == 1
    assert house.value("llmtrain_recovery_seconds_sum", **{"class": "NodeLost"}) == 12.5
    assert house.value("llmtrain_lost_steps_total", **{"class": "NodeLost"}) == 7
    assert house.value("llmtrain_failures_total", **{"class": "NodeLost", "action": "ReplaceNode"}) == 1


@pytest.mark.parametrize("state", sorted(TERMINAL_STATES))
def test_an_end_is_counted_once_and_owes_no_step(state: State) -> None:
    house = House()
    house.decide(KEY, _status(State.TRAINING), _status(state))
    house.decide(KEY, _status(state), _status(state, message="later"))
    house.decide(KEY, _status(state))
    assert house.value("llmtrain_jobs_ended_total", state=state.value) == 1
    assert house.value("llmtrain_longest_without_step_seconds") == 0
    assert house.value("llmtrain_oldest_checkpoint_seconds") == 0


def test_the_oldest_of_several_jobs_is_told_and_grows_with_time() -> None:
    house = House()
    house.decide(KEY, _status(State.TRAINING, progress=_progress(NOW - 5)))
    house.decide(OTHER, _status(State.TRAINING, progress=_progress(NOW - 70)))
    house.now += 30
    assert house.value("llmtrain_longest_without_step_seconds") == 100
    house.metrics.forgotten(OTHER)
    assert house.value("llmtrain_longest_without_step_seconds") == 35


def test_restarts_without_a_step_do_not_make_a_job_young() -> None:
    house = House()
    for attempt in range(2, 6):
        house.now = NOW + 100 * attempt
        again = {"attempt": attempt, "attempt_started_at": to_timestamp(house.now), "progress": _progress(NOW)}
        house.decide(KEY, _status(State.RESTARTING, **again))
        assert house.value("llmtrain_longest_without_step_seconds") == 100 * attempt


def test_a_resumed_job_owes_its_step_and_its_checkpoint_from_then_on() -> None:
    house = House()
    resumed = {"type": ConditionType.SUSPENDED, "status": "False", "reason": "Resumed"}
    status = _status(
        State.TRAINING,
        begun=NOW - 90_000,
        progress=_progress(NOW - 80_000),
        checkpoint={"last_good_step": 40, "committed_at": to_timestamp(NOW - 80_000)},
        conditions=[{**resumed, "last_transition_time": to_timestamp(NOW - 20)}],
    )
    house.decide(KEY, status)
    assert house.value("llmtrain_longest_without_step_seconds") == 20
    assert house.value("llmtrain_oldest_checkpoint_seconds") == 20


def test_waiting_is_told_by_state_and_a_status_without_times_counts_from_the_first_look() -> None:
    house = House()
    house.decide(KEY, _status(State.PENDING, attempt_started_at=to_timestamp(NOW - 60)))
    house.decide(OTHER, LLMTrainJobStatus(state=State.BLOCKED))
    house.now += 40
    house.decide(OTHER, LLMTrainJobStatus(state=State.BLOCKED))
    assert house.value("llmtrain_longest_wait_seconds", state="Pending") == 100
    assert house.value("llmtrain_longest_wait_seconds", state="Blocked") == 40


def test_an_object_that_cannot_be_read_is_a_blocked_job() -> None:
    house = House()
    house.metrics.unreadable(KEY)
    house.now += 10
    house.metrics.unreadable(KEY)
    assert house.value("llmtrain_unreadable_jobs_total") == 2
    assert house.value("llmtrain_jobs", state="Blocked") == 1
    assert house.value("llmtrain_longest_wait_seconds", state="Blocked") == 10


def test_checkpoints_that_fail_are_counted_until_one_is_written() -> None:
    house = House()
    house.decide(KEY, _status(State.TRAINING, checkpoint={"failed": "step 50: no space left"}))
    assert house.value("llmtrain_jobs_with_failing_checkpoints") == 1
    committed = {"last_good_step": 60, "committed_at": to_timestamp(NOW - 3)}
    house.decide(KEY, _status(State.TRAINING, checkpoint=committed))
    assert house.value("llmtrain_jobs_with_failing_checkpoints") == 0
    assert house.value("llmtrain_oldest_checkpoint_seconds") == 3


@pytest.mark.parametrize("state", State)
def test_only_agents_of_jobs_that_run_count_as_silent(state: State) -> None:
    house = House()
    house.silent = {KEY: [0.0, 29.0, 31.0, 500.0], JobKey("lab", "unknown"): [900.0]}
    house.decide(KEY, _status(state))
    assert house.value("llmtrain_agents_silent") == (2 if state in STEPPING else 0)


def test_no_name_of_a_job_is_told_unless_asked_for() -> None:
    house = House()
    house.decide(JobKey("secret-team", "secret-run"), _status(State.TRAINING, progress=_progress(NOW)))
    assert b"secret" not in house.metrics.exposition()


@pytest.mark.parametrize("end", [State.SUCCEEDED, None], ids=["ended", "deleted"])
def test_series_of_a_job_vanish_with_it(end: State | None) -> None:
    house = House(each_job=True)
    house.decide(KEY, _status(State.TRAINING, progress=_progress(NOW - 5)))
    labels = {"job_namespace": "lab", "job_name": "demo"}
    assert house.value("llmtrain_job_step", **labels) == 40
    assert house.value("llmtrain_job_tokens_per_second", **labels) == 123.5
    assert house.value("llmtrain_job_step_age_seconds", **labels) == 5
    assert house.value("llmtrain_job_checkpoint_age_seconds", **labels) == 1000
    if end:
        house.decide(KEY, _status(State.TRAINING), _status(end))
    else:
        house.metrics.forgotten(KEY)
    assert b"demo" not in house.metrics.exposition()


def _ledger(**milliseconds: int) -> dict[str, Any]:
    return {"accounted_until": to_timestamp(NOW), "milliseconds": milliseconds}


def test_time_is_told_by_part_over_all_jobs_that_go_on() -> None:
    house = House()
    house.decide(KEY, _status(State.TRAINING, goodput=_ledger(compute=5_000, redone=250)))
    house.decide(OTHER, _status(State.SUSPENDED, goodput=_ledger(compute=1_000, suspended=9_000)))
    house.decide(JobKey("lab", "third"), _status(State.SUCCEEDED, goodput=_ledger(compute=77_000)))
    told = {part.value: house.value("llmtrain_job_time_seconds", part=part.value) for part in GoodputPart}
    assert {part: seconds for part, seconds in told.items() if seconds} == {
        "compute": 6.0,
        "redone": 0.25,
        "suspended": 9.0,
    }


def test_the_lowest_goodput_is_that_of_a_job_which_had_its_workers_for_an_hour() -> None:
    house = House()
    hour = 3_600_000
    house.decide(KEY, _status(State.TRAINING, goodput=_ledger(compute=hour, start=hour // 4, scheduling=50 * hour)))
    assert house.value("llmtrain_lowest_goodput_ratio") == 0.8
    house.decide(OTHER, _status(State.RESTARTING, goodput=_ledger(restart=hour - 1)))
    assert house.value("llmtrain_lowest_goodput_ratio") == 0.8
    house.decide(OTHER, _status(State.RESTARTING, goodput=_ledger(restart=hour)))
    assert house.value("llmtrain_lowest_goodput_ratio") == 0.0
    house.metrics.forgotten(KEY)
    house.metrics.forgotten(OTHER)
    assert house.value("llmtrain_lowest_goodput_ratio") == 1.0
