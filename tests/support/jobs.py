"""Builders: make_job().with_workers(4).build(), make_worker(...), make_agent(...), make_observed(job, ...)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from llmtrain_api.constants import API_VERSION, KIND, State
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.sync import Progress, RankError, RankReport
from llmtrain_operator.core.actions import Plan
from llmtrain_operator.core.names import worker_name
from llmtrain_operator.core.observed import AgentView, Observed, Worker
from llmtrain_operator.core.plan import plan
from llmtrain_operator.core.times import to_timestamp

NOW = 1_800_000_000.0
"""The Unix time at which tests begin."""


class JobBuilder:
    """A job of the tiny model on CPU, changed step by step; every call returns the builder itself."""

    def __init__(self, name: str = "demo", namespace: str = "lab") -> None:
        self._metadata: dict[str, Any] = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": 1}
        self._spec: dict[str, Any] = {
            "workers": {"replicas": 2, "accelerator": {"count": 0}, "device": "cpu", "image": "llmtrain/trainer:test"},
            "model": {"preset": "tiny"},
            "training": {"steps": 100},
            "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
            "checkpoint": {"store": f"pvc://checkpoints/{name}", "everySteps": 10},
        }
        self._status: LLMTrainJobStatus | None = None

    def with_workers(self, replicas: int, ranks_per_worker: int = 1) -> JobBuilder:
        self._spec["workers"].update(replicas=replicas, ranksPerWorker=ranks_per_worker)
        return self

    def with_spec(self, **fields: Any) -> JobBuilder:
        """Merge fields (camelCase) into the spec; dictionaries are merged one level deep."""
        for name, value in fields.items():
            old = self._spec.get(name)
            self._spec[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        return self

    def with_deadlines(self, **seconds: int) -> JobBuilder:
        policy = self._spec.setdefault("failurePolicy", {})
        policy["deadlines"] = {**policy.get("deadlines", {}), **seconds}
        return self

    def with_budgets(self, **restarts: int) -> JobBuilder:
        policy = self._spec.setdefault("failurePolicy", {})
        policy["budgets"] = {**policy.get("budgets", {}), **restarts}
        return self

    def with_metadata(self, **fields: Any) -> JobBuilder:
        self._metadata.update(fields)
        return self

    def with_status(self, status: LLMTrainJobStatus | None = None, **fields: Any) -> JobBuilder:
        """Set the status, or change fields (snake_case) of the one that is there."""
        base = status or self._status or LLMTrainJobStatus()
        self._status = LLMTrainJobStatus.model_validate({**base.model_dump(), **fields})
        return self

    def running(self, attempt: int = 1, now: float = NOW, **fields: Any) -> JobBuilder:
        """Set the status of a job whose attempt has been training for a minute."""
        begun = to_timestamp(now - 60)
        defaults = {
            "state": State.TRAINING,
            "attempt": attempt,
            "started_attempt": attempt,
            "attempt_started_at": begun,
            "start_time": begun,
        }
        return self.with_status(**{**defaults, **fields})

    def manifest(self) -> dict[str, Any]:
        """Return plain data, as `kubectl apply` would send it."""
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": self._metadata, "spec": self._spec}
        return copy.deepcopy(document)

    def build(self) -> LLMTrainJob:
        job = LLMTrainJob.parse(self.manifest())
        return job.model_copy(update={"status": self._status}) if self._status else job


def make_job(name: str = "demo", namespace: str = "lab") -> JobBuilder:
    return JobBuilder(name, namespace)


def make_rank(global_rank: int = 0, exit_code: int | None = None, **fields: Any) -> RankReport:
    """Return a running rank, or an ended one where an exit code or a signal is given."""
    ended = exit_code is not None or fields.get("signal") is not None
    defaults: dict[str, Any] = {
        "local_rank": 0,
        "pid": 100 + global_rank,
        "state": "exited" if ended else "running",
        "exited_at": NOW - 0.01 if ended else None,
    }
    message = fields.pop("message", None)
    if message is not None:
        fields["error"] = RankError(message=message)
    return RankReport(global_rank=global_rank, exit_code=exit_code, **{**defaults, **fields})


def make_agent(index: int = 0, attempt: int = 0, ranks: Iterable[RankReport] | None = None, **fields: Any) -> AgentView:
    """Return a connected agent; with an attempt, one running rank of it unless ranks are given."""
    if ranks is None:
        ranks = [make_rank(index)] if attempt else []
    defaults: dict[str, Any] = {"agent_id": f"agent-{index}", "address": f"10.0.0.{index + 1}", "last_seen": NOW}
    return AgentView(attempt=attempt, ranks=tuple(ranks), **{**defaults, **fields})


def make_progress(attempt: int = 1, step: int = 5, **fields: Any) -> Progress:
    defaults: dict[str, Any] = {
        "first_step": 1,
        "first_step_at": NOW - 10,
        "steps": 100,
        "tokens": step * 1024,
        "loss": 2.5,
        "tokens_per_second": 512.0,
        "step_at": NOW - 1,
    }
    return Progress(attempt=attempt, step=step, **{**defaults, **fields})


def make_worker(index: int = 0, created_attempt: int = 1, job: str = "demo", **fields: Any) -> Worker:
    """Return a running worker of a gang of two without an agent."""
    name = worker_name(job, index, created_attempt)
    defaults: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "replicas": 2,
        "phase": "Running",
        "created_at": NOW - 60,
        "node": f"node-{index}",
    }
    return Worker(index=index, created_attempt=created_attempt, **{**defaults, **fields})


def make_gang(replicas: int = 2, attempt: int = 1, created_attempt: int = 1, **agent: Any) -> list[Worker]:
    """Return running workers with connected agents, each with one running rank where `attempt` is not 0."""
    return [
        make_worker(i, created_attempt, replicas=replicas, agent=make_agent(i, attempt, **agent))
        for i in range(replicas)
    ]


def make_observed(job: LLMTrainJob | JobBuilder, workers: Iterable[Worker] = (), **fields: Any) -> Observed:
    built = job.build() if isinstance(job, JobBuilder) else job
    return Observed(job=built, workers=tuple(workers), **{"now": NOW, **fields})


def decide(builder: JobBuilder, workers: Sequence[Worker], now: float = NOW, **fields: Any) -> Plan:
    """Plan, and make the status durable as the shell would: the next decision starts from it."""
    decision = plan(make_observed(builder, workers, now=now, **fields))
    if decision.status_changed:
        builder.with_status(LLMTrainJobStatus.model_validate(decision.status.to_wire()))
    return decision
