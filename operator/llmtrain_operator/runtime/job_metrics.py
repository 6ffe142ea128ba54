"""What is true of jobs at the moment of a scrape: how many, how long they wait, how old their checkpoints are.

Kept as plain facts of each job's status and turned into numbers only when they are asked for: ages need no timer, and
a job that is gone leaves no series behind.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from llmtrain_api.constants import TERMINAL_STATES, ConditionType, GoodputPart, State
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.status_goodput import GoodputParts
from llmtrain_operator.core.times import from_timestamp
from llmtrain_operator.runtime.backend import JobKey

WAITING = (State.PENDING, State.BLOCKED)
STEPPING = (State.STARTING, State.TRAINING, State.RESTARTING)
"""Jobs in these states hold accelerators and owe a step."""
SILENT_SECONDS = 30.0
"""An agent holds a request nearly all the time: one not heard of for so long is cut off, stuck or dead."""
JUDGED_SECONDS = 3600.0
"""A job that has held all its workers for less is too young for its goodput to say anything."""

Silences = Callable[[], Mapping[JobKey, Iterable[float]]]


@dataclass(frozen=True)
class JobFacts:
    """What the metrics need of one job; times are Unix seconds."""

    state: State
    since: float
    """When the job was last accepted, resumed or given a new attempt; else when it was first looked at."""
    stepped_at: float
    """When its newest step was taken down, or it began to owe one."""
    checkpoint_at: float
    """When its newest checkpoint was committed, or it began to owe one."""
    checkpoint_fails: bool = False
    step: int | None = None
    tokens_per_second: float | None = None
    parts: GoodputParts = field(default_factory=GoodputParts)
    """Where its time went, as far as the ledger has come."""
    accelerator: GoodputParts = field(default_factory=GoodputParts)
    """The same times the accelerators held."""

    @property
    def held_seconds(self) -> float:
        """How long all its workers had their nodes."""
        parts = self.parts
        return (parts.total() - parts.scheduling - parts.suspended - parts.idle) / 1000


def facts_of(status: LLMTrainJobStatus, now: float) -> JobFacts | None:
    """Return the facts of a status, None before it has a state; `now` stands in for unknown times (Unix seconds)."""
    if status.state is None:
        return None
    accepted = _changed(status, ConditionType.ACCEPTED)
    resumed = _changed(status, ConditionType.SUSPENDED)
    begun = max(accepted, resumed, from_timestamp(status.start_time) or 0.0) or now
    progress = status.progress
    return JobFacts(
        state=status.state,
        since=max(begun, from_timestamp(status.attempt_started_at) or 0.0),
        # A restart is no step: a job that restarts for ever without a step must not look young.
        stepped_at=max(begun, from_timestamp(progress.updated_at) or 0.0) if progress else begun,
        checkpoint_at=max(begun, from_timestamp(status.checkpoint.committed_at) or 0.0),
        checkpoint_fails=bool(status.checkpoint.failed),
        step=progress.step if progress else None,
        tokens_per_second=_number(progress.tokens_per_second) if progress else None,
        parts=status.goodput.milliseconds if status.goodput else GoodputParts(),
        accelerator=status.goodput.accelerator_milliseconds if status.goodput else GoodputParts(),
    )


class JobGauges(Collector):
    """The gauges over jobs. All methods belong to one event loop."""

    def __init__(self, *, each_job: bool = False, clock: Callable[[], float] = time.time) -> None:
        """`each_job` adds series with a job's namespace and name: as many as there are unfinished jobs."""
        self._each_job = each_job
        self._clock = clock
        self._facts: dict[JobKey, JobFacts] = {}
        self._silences: Silences = dict

    def watch(self, silences: Silences) -> None:
        """Ask for the seconds since each agent was heard of, by job, when the metrics are asked for."""
        self._silences = silences

    def take(self, key: JobKey, status: LLMTrainJobStatus) -> None:
        """Keep what a durable status says."""
        now = self._clock()
        facts, old = facts_of(status, now), self._facts.get(key)
        if facts is None:
            self.forget(key)
        elif old is not None and old.state is facts.state and facts.since == now:
            pass  # it tells no times: its age counts from the first look
        else:
            self._facts[key] = facts

    def unreadable(self, key: JobKey) -> None:
        """Keep that the job cannot be read: it is blocked, whatever its status says."""
        old, now = self._facts.get(key), self._clock()
        if old is None or old.state is not State.BLOCKED:
            self._facts[key] = JobFacts(State.BLOCKED, now, now, now)

    def forget(self, key: JobKey) -> None:
        """Drop a job that is gone."""
        self._facts.pop(key, None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every gauge as of now."""
        now = self._clock()
        yield self._jobs()
        yield from self._ages(now)
        yield self._silent()
        yield from self._goodput()
        if self._each_job:
            yield from self._per_job(now)

    def _jobs(self) -> GaugeMetricFamily:
        counts = Counter(facts.state for facts in self._facts.values())
        family = GaugeMetricFamily("llmtrain_jobs", "Jobs, by state.", labels=["state"])
        for state in State:
            family.add_metric([state.value], counts[state])
        return family

    def _in(self, states: Iterable[State]) -> list[JobFacts]:
        wanted = frozenset(states)
        return [facts for facts in self._facts.values() if facts.state in wanted]

    def _ages(self, now: float) -> Iterator[GaugeMetricFamily]:
        wait = GaugeMetricFamily(
            "llmtrain_longest_wait_seconds", "Age of the job that waits longest, by state.", labels=["state"]
        )
        for state in WAITING:
            wait.add_metric([state.value], _oldest(now, (facts.since for facts in self._in([state]))))
        yield wait
        stalled = GaugeMetricFamily(
            "llmtrain_longest_without_step_seconds",
            "Time since the newest step of the job whose newest step is oldest, of those that hold workers.",
        )
        stalled.add_metric([], _oldest(now, (facts.stepped_at for facts in self._in(STEPPING))))
        yield stalled
        training = self._in([State.TRAINING])
        oldest = GaugeMetricFamily(
            "llmtrain_oldest_checkpoint_seconds",
            "Age of the newest checkpoint of the training job whose newest checkpoint is oldest.",
        )
        oldest.add_metric([], _oldest(now, (facts.checkpoint_at for facts in training)))
        yield oldest
        failing = GaugeMetricFamily(
            "llmtrain_jobs_with_failing_checkpoints", "Training jobs whose newest checkpoint could not be written."
        )
        failing.add_metric([], sum(facts.checkpoint_fails for facts in training))
        yield failing

    def _silent(self) -> GaugeMetricFamily:
        silences = self._silences()
        stepping = [key for key, facts in self._facts.items() if facts.state in STEPPING]
        silent = sum(1 for key in stepping for seconds in silences.get(key, ()) if seconds > SILENT_SECONDS)
        family = GaugeMetricFamily(
            "llmtrain_agents_silent", f"Agents of running jobs that were not heard of for {SILENT_SECONDS:.0f} seconds."
        )
        family.add_metric([], silent)
        return family

    def _goodput(self) -> Iterator[GaugeMetricFamily]:
        wall = GaugeMetricFamily(
            "llmtrain_job_time_seconds",
            "Time since creation of all jobs that have not ended, by part.",
            labels=["part"],
        )
        accelerators = GaugeMetricFamily(
            "llmtrain_job_accelerator_seconds", "The same times the accelerators that were held.", labels=["part"]
        )
        going = [facts for facts in self._facts.values() if facts.state not in TERMINAL_STATES]
        for family, booked in (
            (wall, [facts.parts.to_wire() for facts in going]),
            (accelerators, [facts.accelerator.to_wire() for facts in going]),
        ):
            for part in GoodputPart:
                family.add_metric([part.value], sum(parts[part.value] for parts in booked) / 1000)
            yield family
        lowest = GaugeMetricFamily(
            "llmtrain_lowest_goodput_ratio",
            "Steps that count, of the time with all workers, of the job where that is least; 1 where there is none.",
        )
        judged = [facts for facts in self._in(STEPPING) if facts.held_seconds >= JUDGED_SECONDS]
        lowest.add_metric([], min((facts.parts.compute / 1000 / facts.held_seconds for facts in judged), default=1.0))
        yield lowest

    def _per_job(self, now: float) -> Iterator[GaugeMetricFamily]:
        # Not "namespace": Prometheus gives every series that of the operator's own pod, and renames a second one.
        labels = ["job_namespace", "job_name"]
        step = GaugeMetricFamily("llmtrain_job_step", "Optimizer steps done.", labels=labels)
        rate = GaugeMetricFamily("llmtrain_job_tokens_per_second", "Over all ranks.", labels=labels)
        step_age = GaugeMetricFamily("llmtrain_job_step_age_seconds", "Time since the newest step.", labels=labels)
        checkpoint_age = GaugeMetricFamily(
            "llmtrain_job_checkpoint_age_seconds", "Time since the newest checkpoint.", labels=labels
        )
        for key, facts in self._facts.items():
            if facts.state not in STEPPING:
                continue
            values = [key.namespace, key.name]
            step_age.add_metric(values, max(now - facts.stepped_at, 0.0))
            checkpoint_age.add_metric(values, max(now - facts.checkpoint_at, 0.0))
            if facts.step is not None:
                step.add_metric(values, facts.step)
            if facts.tokens_per_second is not None:
                rate.add_metric(values, facts.tokens_per_second)
        yield from (step, rate, step_age, checkpoint_age)


def _changed(status: LLMTrainJobStatus, kind: ConditionType) -> float:
    condition = status.condition(kind)
    return (from_timestamp(condition.last_transition_time) or 0.0) if condition else 0.0


def _oldest(now: float, moments: Iterable[float]) -> float:
    return max(now - min(moments, default=now), 0.0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
