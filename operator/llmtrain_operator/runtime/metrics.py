"""Prometheus metrics. Labels are bounded: no names of jobs or pods, unless the platform engineer asks for them.

Every metric is told in docs/reference/metrics.md, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client import Counter as PrometheusCounter

from llmtrain_api.constants import TERMINAL_STATES, Action, FailureClass
from llmtrain_api.status import FailureStatus, LLMTrainJobStatus
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.kube.client import Call
from llmtrain_operator.runtime.backend import JobKey
from llmtrain_operator.runtime.job_metrics import JobGauges, Silences
from llmtrain_operator.runtime.reconciler import Result

RECONCILE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
RECOVERY_BUCKETS = (1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
REFUSAL_CODES = (400, 401, 403, 404, 409, 413, 500, 503)


@dataclass(frozen=True)
class Sources:
    """What is read when the metrics are asked for."""

    queue_depth: Callable[[], int]
    queue_oldest_seconds: Callable[[], float]
    agents: Callable[[], int]
    silences: Silences
    """By job, the seconds since each of its agents was heard of."""
    leader: Callable[[], bool]
    watching: Callable[[], bool]
    watch_age_seconds: Callable[[], float]
    """Since anything was heard from the API server by watch or list."""


class Metrics:
    """Counts what the operator does. Implements runtime.reconciler.Listener."""

    def __init__(self, jobs: JobGauges | None = None) -> None:
        # Times of creation would double the series and tell no more than when the process started.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._jobs = jobs or JobGauges()
        self.registry.register(self._jobs)
        self._duration = Histogram(
            "llmtrain_reconcile_duration_seconds",
            "Time of one look at one job.",
            buckets=RECONCILE_BUCKETS,
            registry=self.registry,
        )
        self._recovery = Histogram(
            "llmtrain_recovery_seconds",
            "From a failure to the first optimizer step after it, by class.",
            ["class"],
            buckets=RECOVERY_BUCKETS,
            registry=self.registry,
        )
        self._reconciles = self._counter("llmtrain_reconciles", "Looks at jobs, by result.", "result")
        self._failures = self._counter(
            "llmtrain_failures", "Failures of jobs, by class and by what was done.", "class", "action"
        )
        self._lost_steps = self._counter("llmtrain_lost_steps", "Steps that had to be repeated, by class.", "class")
        self._ended = self._counter("llmtrain_jobs_ended", "Jobs that came to their end, by state.", "state")
        self._unreadable = self._counter("llmtrain_unreadable_jobs", "Looks at jobs whose object cannot be parsed.")
        self._requests = self._counter(
            "llmtrain_api_requests", "Requests to the API server; code 0 is no answer.", "verb", "resource", "code"
        )
        self._refusals = self._counter(
            "llmtrain_sync_refusals", "Requests of agents that the coordinator refused, by HTTP status.", "code"
        )
        self._repairs = self._counter(
            "llmtrain_watch_repairs", "Objects that a list showed in a state that no watch had told."
        )
        self._depth = self._gauge("llmtrain_queue_depth", "Jobs that wait to be looked at.")
        self._waited = self._gauge("llmtrain_queue_oldest_seconds", "How long the first job of the queue has waited.")
        self._agents = self._gauge("llmtrain_agents_connected", "Agents that hold a request.")
        self._leader = self._gauge("llmtrain_leader", "1 where this operator leads.")
        self._watching = self._gauge("llmtrain_watching", "1 where the watches of jobs and pods are alive.")
        self._watch_age = self._gauge(
            "llmtrain_watch_age_seconds", "Time since the API server told anything about jobs and pods."
        )
        build = Gauge("llmtrain_build_info", "Always 1.", ["version"], registry=self.registry)
        build.labels(_version()).set(1)
        self._begin_at_zero()

    def watch(self, sources: Sources) -> None:
        """Read these when the metrics are asked for."""
        self._depth.set_function(sources.queue_depth)
        self._waited.set_function(sources.queue_oldest_seconds)
        self._agents.set_function(sources.agents)
        self._leader.set_function(sources.leader)
        self._watching.set_function(sources.watching)
        self._watch_age.set_function(sources.watch_age_seconds)
        self._jobs.watch(sources.silences)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def api_request(self, call: Call, code: int) -> None:
        """Count a request; called from the client's threads."""
        plural = call.resource.plural
        resource = f"{plural}/{call.subresource}" if call.subresource else plural
        self._requests.labels(call.verb, resource, str(code)).inc()

    def sync_refused(self, code: int) -> None:
        """Count a request of an agent that was refused with this HTTP status."""
        self._refusals.labels(str(code)).inc()

    def repaired(self, objects: int) -> None:
        """Count objects that a list showed anew."""
        self._repairs.inc(objects)

    def reconciled(self, result: Result, seconds: float) -> None:
        self._duration.observe(seconds)
        self._reconciles.labels(result).inc()

    def decided(self, key: JobKey, before: LLMTrainJobStatus, plan: Plan) -> None:
        if not plan.status_changed:
            self._jobs.take(key, before)
            return
        for failure in new_failures(before, plan.status):
            self._failures.labels(failure.failure_class.value, failure.action.value).inc()
        for failure in newly_recovered(before, plan.status):
            self._recovery.labels(failure.failure_class.value).observe(float(failure.seconds_to_next_step or 0))
            self._lost_steps.labels(failure.failure_class.value).inc(failure.lost_steps or 0)
        state = plan.status.state
        if state in TERMINAL_STATES and state is not before.state:
            self._ended.labels(state.value).inc()
        self._jobs.take(key, plan.status)

    def forgotten(self, key: JobKey) -> None:
        self._jobs.forget(key)

    def unreadable(self, key: JobKey) -> None:
        self._unreadable.inc()
        self._jobs.unreadable(key)

    def _begin_at_zero(self) -> None:
        """Make every bounded series now: `increase` does not see the first event of a series born with it."""
        for failure_class in FailureClass:
            self._recovery.labels(failure_class.value)
            self._lost_steps.labels(failure_class.value)
            for action in Action:
                self._failures.labels(failure_class.value, action.value)
        for result in ("ok", "retry", "error"):
            self._reconciles.labels(result)
        for state in TERMINAL_STATES:
            self._ended.labels(state.value)
        for code in REFUSAL_CODES:
            self._refusals.labels(str(code))

    def _counter(self, name: str, text: str, *labels: str) -> PrometheusCounter:
        return PrometheusCounter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)


def new_failures(before: LLMTrainJobStatus, after: LLMTrainJobStatus) -> list[FailureStatus]:
    """Return the failures that the later status has and the earlier has not (later facts about one do not count)."""
    known = {_identity(failure) for failure in before.failures}
    return [failure for failure in after.failures if _identity(failure) not in known]


def newly_recovered(before: LLMTrainJobStatus, after: LLMTrainJobStatus) -> list[FailureStatus]:
    """Return the failures whose cost the later status knows and the earlier did not."""
    known = {_identity(failure) for failure in before.failures if failure.seconds_to_next_step is not None}
    told = [failure for failure in after.failures if failure.seconds_to_next_step is not None]
    return [failure for failure in told if _identity(failure) not in known]


def _identity(failure: FailureStatus) -> tuple[object, ...]:
    return failure.at, failure.attempt, failure.failure_class, failure.pod, failure.rank


def _version() -> str:
    try:
        return version("llmtrain")
    except PackageNotFoundError:
        return "unknown"
