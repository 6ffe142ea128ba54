"""Processes in place of pods: the backend of `llmtrain run --local`.

A worker is one agent process in a session of its own, so it outlives this controller as a pod outlives the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain_api.constants import Env
from llmtrain_api.job import LLMTrainJob, Metadata
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.coordinator.token import job_token
from llmtrain_operator.core.actions import CreateWorker, DeleteWorker, Event
from llmtrain_operator.core.observed import Worker
from llmtrain_operator.local.processes import AGENT_MODULE, kill_agents, open_process, process_start
from llmtrain_operator.local.records import Records, WorkerRecord, write_atomically
from llmtrain_operator.runtime.backend import BackendError, JobKey

HOST = "127.0.0.1"
ORPHAN_SECONDS = 600
"""A worker whose controller never comes back ends when it has been idle this long."""
KILLED = 137
GONE = "its process was gone when `llmtrain run` came back"


@dataclass
class _Process:
    """A worker as this controller knows it."""

    record: WorkerRecord
    popen: subprocess.Popen[bytes] | None = None
    """None for a worker that an earlier controller started."""
    pidfd: int | None = None
    deleting: bool = False
    exit_code: int | None = None
    disruption: str = ""
    stopper: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def uid(self) -> str:
        return f"{self.record.pid}-{self.record.process_start}"


@dataclass(frozen=True)
class LocalOptions:
    """How workers are started."""

    volumes: dict[str, str]
    on_event: Callable[[Event], None]


class LocalBackend:
    """Implements runtime.backend.Backend for one job. All methods belong to one event loop."""

    def __init__(
        self, records: Records, job: dict[str, Any], options: LocalOptions, on_change: Callable[[JobKey], None]
    ) -> None:
        self._records = records
        self._job = job
        self._options = options
        self._coordinator_url = ""
        self._suspended = False
        self._on_change = on_change
        self._processes: dict[str, _Process] = {}
        self.key = JobKey(job["metadata"]["namespace"], job["metadata"]["name"])

    def adopt(self, coordinator_url: str) -> int:
        """Take over the workers that an earlier controller left; return how many live. Before anything else, once.

        Those that dial another address than ours are stopped (their ranks checkpoint), and agents that no record
        tells of, because the controller was killed while it started them, are killed.
        """
        self._coordinator_url = coordinator_url
        for record in self._records.load_workers():
            process = self._processes[record.name] = _Process(record)
            process.pidfd = open_process(record.pid, record.process_start)
            if process.pidfd is None:
                process.exit_code, process.disruption = KILLED, GONE
                continue
            self._watch(process)
            if record.coordinator_url != coordinator_url:
                self._begin_stop(process, float(self.job().spec.failure_policy.deadlines.stop_seconds))
        alive = [process.record.pid for process in self._alive()]
        kill_agents(self._records.workers_folder, spare=frozenset(alive))
        return len(alive)

    def suspend(self) -> None:
        """Let the plan be that of a suspended job from now on: workers checkpoint and leave. Not durable."""
        self._suspended = True

    def job(self) -> LLMTrainJob:
        """Return the job as it stands."""
        return LLMTrainJob.parse(self._job)

    # --- Backend

    def job_manifest(self, key: JobKey) -> dict[str, Any] | None:
        if key != self.key:
            return None
        return {**self._job, "spec": {**self._job["spec"], "suspend": True}} if self._suspended else self._job

    def job_keys(self) -> Sequence[JobKey]:
        return [self.key]

    def workers(self, job: LLMTrainJob) -> Sequence[Worker]:
        return [self._as_worker(process) for process in self._processes.values()]

    async def write_status(self, metadata: Metadata, status: LLMTrainJobStatus) -> None:
        job = {**self._job, "status": status.to_wire()}
        try:
            await asyncio.to_thread(self._records.save_job, job)
        except OSError as error:
            raise BackendError(f"{self._records.folder}/job.json: {error.strerror}") from error
        self._job = job

    async def create_worker(self, job: LLMTrainJob, worker: CreateWorker) -> None:
        if worker.name in self._processes:
            return
        try:
            process = self._start(job, worker)
        except OSError as error:
            raise BackendError(f"worker {worker.name} cannot be started: {error}") from error
        self._processes[worker.name] = process
        self._watch(process)
        self._on_change(self.key)

    async def delete_worker(self, job: LLMTrainJob, worker: DeleteWorker) -> None:
        process = self._processes.get(worker.name)
        if process is None or process.uid != worker.uid:
            return
        if process.exit_code is not None:
            self._forget(process)
            return
        stop_seconds = float(job.spec.failure_policy.deadlines.stop_seconds)
        self._begin_stop(process, stop_seconds if worker.grace_seconds is None else worker.grace_seconds)

    async def delete_job(self, job: LLMTrainJob) -> None:
        """A finished local run ends with its command; its record stays for `llmtrain status`."""

    async def emit_event(self, job: LLMTrainJob, event: Event) -> None:
        self._options.on_event(event)

    # --- ending

    async def all_ended(self) -> None:
        """Return when no worker runs any more."""
        while alive := self._alive():
            await asyncio.gather(*(process.ended.wait() for process in alive))

    def stop_all(self, grace: float) -> None:
        """Stop every worker with SIGTERM, so that ranks checkpoint, then SIGKILL after `grace` seconds; 0: now."""
        for process in self._alive():
            self._begin_stop(process, grace)

    # --- processes

    def _alive(self) -> list[_Process]:
        return [process for process in self._processes.values() if process.exit_code is None]

    def _start(self, job: LLMTrainJob, worker: CreateWorker) -> _Process:
        folder = self._records.worker_folder(worker.name)
        work = folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        token = folder / "token"
        write_atomically(token, job_token(self._records.key(), job.metadata.uid), 0o600)
        with open(folder / "log", "ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", AGENT_MODULE],
                env={**os.environ, **self._environment(job, worker, token, work)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is for us, who stop it with grace
            )
        record = WorkerRecord(
            name=worker.name,
            index=worker.index,
            attempt=worker.attempt,
            replicas=job.spec.workers.replicas,
            pid=popen.pid,
            process_start=process_start(popen.pid) or 0,
            created_at=time.time(),
            coordinator_url=self._coordinator_url,
        )
        try:
            self._records.save_worker(record)
        except OSError:
            popen.kill()
            popen.wait()
            raise
        return _Process(record, popen, os.pidfd_open(popen.pid))

    def _environment(self, job: LLMTrainJob, worker: CreateWorker, token: Path, work: Path) -> dict[str, str]:
        return {
            Env.COORDINATOR_URL: self._coordinator_url,
            Env.TOKEN_FILE: str(token.absolute()),
            Env.JOB_NAMESPACE: self.key.namespace,
            Env.JOB_NAME: self.key.name,
            Env.JOB_UID: job.metadata.uid,
            Env.POD_NAME: worker.name,
            Env.POD_ADDRESS: HOST,
            Env.WORKER_INDEX: str(worker.index),
            Env.GRACE_SECONDS: str(job.spec.failure_policy.deadlines.stop_seconds),
            Env.ORPHAN_SECONDS: str(ORPHAN_SECONDS),
            Env.WORK_DIR: str(work.absolute()),
            Env.VOLUMES: json.dumps(self._options.volumes),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONSAFEPATH": "1",  # a random.py in the user's folder must not take the place of Python's own
        }

    def _watch(self, process: _Process) -> None:
        """Hear of the process's end at once, also where it is not our child."""
        assert process.pidfd is not None
        asyncio.get_running_loop().add_reader(process.pidfd, self._ended, process)

    def _ended(self, process: _Process) -> None:
        assert process.pidfd is not None
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)
        process.pidfd = None
        process.exit_code = _exit_code(process)
        process.ended.set()
        if process.deleting:
            self._forget(process)
        self._on_change(self.key)

    def _forget(self, process: _Process) -> None:
        self._processes.pop(process.record.name, None)
        with contextlib.suppress(OSError):
            self._records.forget_worker(process.record.name)

    def _begin_stop(self, process: _Process, grace: float) -> None:
        """Stop a worker. Repeated, only what comes sooner counts: at once (grace 0)."""
        if process.stopper and grace > 0:
            return
        if process.stopper:
            process.stopper.cancel()
        process.deleting = True
        process.stopper = asyncio.create_task(_stop(process, grace))

    def _as_worker(self, process: _Process) -> Worker:
        record, code = process.record, process.exit_code
        return Worker(
            name=record.name,
            uid=process.uid,
            index=record.index,
            created_attempt=record.attempt,
            replicas=record.replicas,
            phase="Running" if code is None else "Succeeded" if code == 0 else "Failed",
            created_at=record.created_at,
            deleting=process.deleting,
            node="this machine",
            waiting_message=f"see {self._records.worker_folder(record.name)}/log" if code else "",
            exit_code=code,
            disruption=process.disruption,
        )


def _exit_code(process: _Process) -> int:
    """Return the agent's exit code as a container runtime gives it: 128 + signal for a killed one."""
    if process.popen is None:
        return KILLED  # not our child: its code went to another; the agent's last report tells success from failure
    code = process.popen.wait()
    return 128 - code if code < 0 else code


async def _stop(process: _Process, grace: float) -> None:
    if grace > 0:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.ended.wait(), grace)
    _signal(process, signal.SIGKILL)


def _signal(process: _Process, number: signal.Signals) -> None:
    if process.pidfd is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, number)
