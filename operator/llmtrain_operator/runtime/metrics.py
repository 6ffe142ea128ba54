"""Prometheus metrics. Labels are bounded: no names of jobs or pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter

from llmtrain_api.constants import State
from llmtrain_api.status import FailureStatus, LLMTrainJobStatus
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.kube.client import Call
from llmtrain_operator.runtime.backend import JobKey
from llmtrain_operator.runtime.reconciler import Result

RECONCILE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)


class Metrics:
    """Counts what the operator does. Implements runtime.reconciler.Listener."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._states: dict[JobKey, str] = {}
        self._duration = Histogram(
            "llmtrain_reconcile_duration_seconds",
            "Time of one look at one job.",
            buckets=RECONCILE_BUCKETS,
            registry=self.registry,
        )
        self._reconciles = PrometheusCounter(
            "llmtrain_reconciles", "Looks at jobs, by result.", ["result"], registry=self.registry
        )
        self._failures = PrometheusCounter(
            "llmtrain_failures",
            "Failures of jobs, by class and by what was done.",
            ["class", "action"],
            registry=self.registry,
        )
        self._unreadable = PrometheusCounter(
            "llmtrain_unreadable_jobs", "Looks at jobs whose object cannot be parsed.", registry=self.registry
        )
        self._requests = PrometheusCounter(
            "llmtrain_api_requests",
            "Requests to the API server; code 0 is no answer.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self._jobs = Gauge("llmtrain_jobs", "Jobs, by state.", ["state"], registry=self.registry)
        self._depth = Gauge("llmtrain_queue_depth", "Jobs that wait to be looked at.", registry=self.registry)
        self._agents = Gauge("llmtrain_agents_connected", "Agents that hold a request.", registry=self.registry)
        self._leader = Gauge("llmtrain_leader", "1 where this operator leads.", registry=self.registry)
        build = Gauge("llmtrain_build_info", "Always 1.", ["version"], registry=self.registry)
        build.labels(_version()).set(1)
        for state in State:
            self._jobs.labels(state.value).set(0)

    def watch(self, depth: Callable[[], int], agents: Callable[[], int], leader: Callable[[], bool]) -> None:
        """Read these when the metrics are asked for."""
        self._depth.set_function(depth)
        self._agents.set_function(agents)
        self._leader.set_function(leader)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def api_request(self, call: Call, code: int) -> None:
        """Count a request; called from the client's threads."""
        plural = call.resource.plural
        resource = f"{plural}/{call.subresource}" if call.subresource else plural
        self._requests.labels(call.verb, resource, str(code)).inc()

    def reconciled(self, result: Result, seconds: float) -> None:
        self._duration.observe(seconds)
        self._reconciles.labels(result).inc()

    def decided(self, key: JobKey, before: LLMTrainJobStatus, plan: Plan) -> None:
        if plan.status_changed:
            for failure in new_failures(before, plan.status):
                self._failures.labels(failure.failure_class.value, failure.action.value).inc()
        state = plan.status.state if plan.status_changed else before.state
        self._set_state(key, state.value if state else None)

    def forgotten(self, key: JobKey) -> None:
        self._set_state(key, None)

    def unreadable(self, key: JobKey) -> None:
        self._unreadable.inc()
        self._set_state(key, State.BLOCKED.value)

    def _set_state(self, key: JobKey, state: str | None) -> None:
        old = self._states.pop(key, None)
        if state is not None:
            self._states[key] = state
        if old == state:
            return
        counts = Counter(self._states.values())
        for changed in (old, state):
            if changed is not None:
                self._jobs.labels(changed).set(counts[changed])


def new_failures(before: LLMTrainJobStatus, after: LLMTrainJobStatus) -> list[FailureStatus]:
    """Return the failures that the later status has and the earlier has not (later facts about one do not count)."""
    known = {_identity(failure) for failure in before.failures}
    return [failure for failure in after.failures if _identity(failure) not in known]


def _identity(failure: FailureStatus) -> tuple[object, ...]:
    return failure.at, failure.attempt, failure.failure_class, failure.pod, failure.rank


def _version() -> str:
    try:
        return version("llmtrain")
    except PackageNotFoundError:
        return "unknown"
