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
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.coordinator.token import job_token
from llmtrain_operator.core.actions import CreateWorker, DeleteWorker, Event
from llmtrain_operator.core.observed import Worker
from llmtrain_operator.local.records import Records, WorkerRecord, process_start, write_atomically
from llmtrain_operator.runtime.backend import BackendError, JobKey

AGENT_MODULE = "llmtrain_trainer.agent.main"
ORPHAN_SECONDS = 600
"""A worker whose controller never comes back ends when it has been idle this long."""
KILLED = 137
EXIT_FILE = "exit"


@dataclass
class _Process:
    """A worker as this controller knows it."""

    record: WorkerRecord
    popen: subprocess.Popen[bytes] | None = None
    """None for a worker that an earlier controller started."""
    deleting: bool = False
    exit_code: int | None = None
    stopper: asyncio.Task[None] | None = None
    pidfd: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class LocalOptions:
    """How workers are started."""

    coordinator_url: str
    volumes: dict[str, str] = field(default_factory=dict)
    on_event: Callable[[Event], None] | None = None


class LocalBackend:
    """Implements runtime.backend.Backend for one job. All methods belong to one event loop."""

    def __init__(
        self, records: Records, job: dict[str, Any], options: LocalOptions, on_change: Callable[[JobKey], None]
    ) -> None:
        self._records = records
        self._job = job
        self._options = options
        self._key = JobKey(job["metadata"]["namespace"], job["metadata"]["name"])
        self._on_change = on_change
        self._processes: dict[str, _Process] = {}

    def adopt(self) -> None:
        """Take over the workers that an earlier controller left. Call from the event loop, once."""
        for record in self._records.load_workers():
            process = _Process(record)
            self._processes[record.name] = process
            if process_start(record.pid) == record.process_start:
                self._watch(process)
            else:
                process.exit_code = self._exit_code(process)

    # --- Backend

    def job_manifest(self, key: JobKey) -> dict[str, Any] | None:
        return self._job if key == self._key else None

    def job_keys(self) -> Sequence[JobKey]:
        return [self._key]

    def workers(self, job: LLMTrainJob) -> Sequence[Worker]:
        return [_as_worker(process) for process in self._processes.values()]

    async def write_status(self, job: LLMTrainJob, status: LLMTrainJobStatus) -> None:
        self._job = {**self._job, "status": status.to_wire()}
        try:
            await asyncio.to_thread(self._records.save_job, self._job)
        except OSError as error:
            raise BackendError(f"cannot write {self._records.folder}/job.json: {error.strerror}") from error

    async def create_worker(self, job: LLMTrainJob, worker: CreateWorker) -> None:
        if worker.name in self._processes:
            return
        try:
            process = self._start(job, worker)
        except OSError as error:
            raise BackendError(f"cannot start worker {worker.name}: {error}") from error
        self._processes[worker.name] = process
        self._watch(process)
        self._on_change(self._key)

    async def delete_worker(self, job: LLMTrainJob, worker: DeleteWorker) -> None:
        process = self._processes.get(worker.name)
        if process is None:
            return
        if process.exit_code is not None:
            self._forget(process)
            return
        grace = job.spec.failure_policy.deadlines.stop_seconds if worker.grace_seconds is None else worker.grace_seconds
        if process.stopper and grace > 0:
            return  # it is being stopped already
        if process.stopper:
            process.stopper.cancel()
        process.deleting = True
        process.stopper = asyncio.create_task(self._stop(process, grace))

    async def delete_job(self, job: LLMTrainJob) -> None:
        """A finished local run ends with its command; its record stays for `llmtrain status`."""

    async def emit_event(self, job: LLMTrainJob, event: Event) -> None:
        if self._options.on_event:
            self._options.on_event(event)

    # --- ending

    async def all_ended(self) -> None:
        """Return when no worker runs any more."""
        await asyncio.gather(*(p.ended.wait() for p in self._processes.values() if p.exit_code is None))

    async def stop_all(self, grace: float) -> None:
        """Stop every worker with SIGTERM, so that ranks checkpoint, then SIGKILL after `grace` seconds."""
        alive = [process for process in self._processes.values() if process.exit_code is None]
        await asyncio.gather(*(self._stop(process, grace) for process in alive))

    # --- processes

    def _start(self, job: LLMTrainJob, worker: CreateWorker) -> _Process:
        folder = self._records.worker_folder(worker.name)
        work = folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        (folder / EXIT_FILE).unlink(missing_ok=True)
        token = folder / "token"
        write_atomically(token, job_token(self._records.key(), job.metadata.uid), 0o600)
        environment = {**os.environ, **self._environment(job, worker, token, work)}
        with open(folder / "log", "ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-m", AGENT_MODULE],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started = process_start(popen.pid) or 0
        replicas = job.spec.workers.replicas
        record = WorkerRecord(
            worker.name, worker.index, worker.attempt, replicas, popen.pid, started, created_at=time.time()
        )
        self._records.save_worker(record)
        return _Process(record, popen)

    def _environment(self, job: LLMTrainJob, worker: CreateWorker, token: Path, work: Path) -> dict[str, str]:
        return {
            Env.COORDINATOR_URL: self._options.coordinator_url,
            Env.TOKEN_FILE: str(token),
            Env.JOB_NAMESPACE: self._key.namespace,
            Env.JOB_NAME: self._key.name,
            Env.JOB_UID: job.metadata.uid,
            Env.POD_NAME: worker.name,
            Env.POD_ADDRESS: "127.0.0.1",
            Env.WORKER_INDEX: str(worker.index),
            Env.GRACE_SECONDS: str(job.spec.failure_policy.deadlines.stop_seconds),
            Env.ORPHAN_SECONDS: str(ORPHAN_SECONDS),
            Env.WORK_DIR: str(work),
            Env.VOLUMES: json.dumps(self._options.volumes),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def _watch(self, process: _Process) -> None:
        """Hear of the process's end at once, also where it is not our child."""
        try:
            process.pidfd = os.pidfd_open(process.record.pid)
        except ProcessLookupError:
            self._ended(process)
            return
        asyncio.get_running_loop().add_reader(process.pidfd, self._ended, process)

    def _ended(self, process: _Process) -> None:
        if process.pidfd is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None
        process.exit_code = self._exit_code(process)
        process.ended.set()
        if process.deleting:
            self._forget(process)
        self._on_change(self._key)

    def _exit_code(self, process: _Process) -> int:
        """Return the agent's exit code as a container runtime gives it: 128 + signal for a killed one."""
        if process.popen is not None:
            code = process.popen.wait()
            return 128 - code if code < 0 else code
        return KILLED  # not our child: its code went to init; the agents' last report tells success from failure

    def _forget(self, process: _Process) -> None:
        self._processes.pop(process.record.name, None)
        self._records.forget_worker(process.record.name)

    async def _stop(self, process: _Process, grace: float) -> None:
        if grace > 0:
            self._signal(process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.ended.wait(), grace)
        if process.exit_code is None:
            self._signal(process, signal.SIGKILL)

    def _signal(self, process: _Process, number: signal.Signals) -> None:
        record = process.record
        if process_start(record.pid) == record.process_start:
            os.kill(record.pid, number)


def _as_worker(process: _Process) -> Worker:
    record = process.record
    code = process.exit_code
    phase = "Running" if code is None else "Succeeded" if code == 0 else "Failed"
    return Worker(
        name=record.name,
        uid=f"{record.pid}-{record.process_start}",
        index=record.index,
        created_attempt=record.attempt,
        replicas=record.replicas,
        phase=phase,
        created_at=record.created_at,
        deleting=process.deleting,
        node="this machine",
        exit_code=code,
    )
