"""`llmtrain run --local`: the operator's own controller over processes of this machine, for one job."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain_api.constants import TERMINAL_STATES
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.uris import Uri
from llmtrain_operator.coordinator.server import CoordinatorServer
from llmtrain_operator.core.actions import Event, Plan
from llmtrain_operator.core.observed import Policy
from llmtrain_operator.core.plan import plan
from llmtrain_operator.local.backend import LocalBackend, LocalOptions
from llmtrain_operator.local.records import LocalStateError, Records
from llmtrain_operator.runtime.backend import JobKey
from llmtrain_operator.runtime.controller import Controller
from llmtrain_operator.runtime.reconciler import Decisions, Result

HOST = "127.0.0.1"
STATUS_PERIOD_SECONDS = 1.0
"""A person is watching, and there is no API server to spare."""
PORTS_PER_RUN = 64
FIRST_PORT = 21_000
RUNS_SIDE_BY_SIDE = 600
LEAVE_SECONDS = 15.0
"""How long the workers of a finished job have to leave by themselves."""


@dataclass(frozen=True)
class LocalRun:
    """What to run and where."""

    manifest: dict[str, Any]
    state: Path
    volumes: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False
    """Forget an earlier run of this name first (its checkpoints stay)."""


@dataclass
class LocalView:
    """What the run tells: every new status, and every event."""

    on_status: Callable[[LLMTrainJob], None]
    on_event: Callable[[Event], None]


def prepare(run: LocalRun) -> tuple[Records, dict[str, Any]]:
    """Become the controller of this job: take up an earlier run of the same manifest, or begin one.

    Raises:
        LocalStateError: the state folder cannot be used, or holds a run of this name with another spec.
    """
    metadata = run.manifest["metadata"]
    records = Records(run.state, metadata.get("namespace", "default"), metadata["name"])
    records.acquire()
    if run.fresh:
        records.forget_job()
    known = records.load_job()
    if known is None:
        return records, records.new_job({**run.manifest, "metadata": {"namespace": "default", **metadata}})
    if known["spec"] != run.manifest["spec"]:
        records.release()
        raise LocalStateError(
            f"{records.folder} holds an earlier run of {metadata['name']} with another spec; "
            "give the job another name, or start anew with --fresh (checkpoints stay)"
        )
    return records, known


class LocalController:
    """Runs one job to its end, or until it is told to stop."""

    def __init__(self, run: LocalRun, view: LocalView) -> None:
        self._run = run
        self._view = view
        self._stopped = asyncio.Event()
        self._finished = asyncio.Event()

    async def run(self) -> LLMTrainJobStatus:
        """Return the status at the end; its state is not terminal where the user stopped the run.

        Raises:
            LocalStateError: see `prepare`; or the coordinator's port cannot be had.
        """
        records, manifest = prepare(self._run)
        try:
            return await self._control(records, manifest)
        finally:
            records.release()

    def stop(self) -> None:
        """Let ranks checkpoint, then end; the next run of the same manifest goes on from there."""
        self._stopped.set()

    async def _control(self, records: Records, manifest: dict[str, Any]) -> LLMTrainJobStatus:
        port = records.port() or _free_port()
        changed: list[Callable[[JobKey], None]] = []
        options = LocalOptions(f"http://{HOST}:{port}", self._volumes(records, manifest), self._view.on_event)
        backend = LocalBackend(records, manifest, options, lambda key: changed[0](key))
        decisions = Decisions(plan=plan, spec_errors=lambda job: (), policy=_policy(records))
        controller = Controller(backend, decisions, self)
        changed.append(controller.queue.add)
        server = CoordinatorServer(controller.hub, records.key(), HOST, port)
        try:
            await server.start()
        except OSError as error:
            raise LocalStateError(f"port {port} of {HOST} is taken: {error}; remove {records.folder}/port") from error
        records.save_port(port)
        backend.adopt()
        controller.reconciler.admit_all()
        working = asyncio.create_task(controller.run(workers=1))
        try:
            await self._until_the_end(backend, manifest)
        finally:
            controller.stop()
            await working
            await server.stop()
        key = backend.job_keys()[0]
        return LLMTrainJob.parse(backend.job_manifest(key) or manifest).status

    async def _until_the_end(self, backend: LocalBackend, manifest: dict[str, Any]) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._stopped, self._finished)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        job = LLMTrainJob.parse(manifest)
        if self._finished.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(backend.all_ended(), LEAVE_SECONDS)
        await backend.stop_all(job.spec.failure_policy.deadlines.stop_seconds)

    def _volumes(self, records: Records, manifest: dict[str, Any]) -> dict[str, str]:
        """Map every claim in use to a folder; those the user does not name lie in the state folder."""
        volumes = {claim: str(Path(folder).absolute()) for claim, folder in self._run.volumes.items()}
        for claim in claims_of(LLMTrainJob.parse(manifest)):
            if claim not in volumes:
                folder = (records.folder / "volumes" / claim).absolute()
                folder.mkdir(parents=True, exist_ok=True)
                volumes[claim] = str(folder)
        return volumes

    # --- Listener

    def reconciled(self, result: Result, seconds: float) -> None:
        """Nobody counts here."""

    def decided(self, key: JobKey, before: LLMTrainJobStatus, plan: Plan) -> None:
        """Show a new status; a terminal one ends the run."""
        if plan.status_changed:
            job = LLMTrainJob.parse(self._run.manifest).model_copy(update={"status": plan.status})
            self._view.on_status(job)
        if plan.status.state in TERMINAL_STATES:
            self._finished.set()

    def forgotten(self, key: JobKey) -> None:
        """A local job cannot be deleted from outside."""

    def unreadable(self, key: JobKey) -> None:
        """The manifest was validated before it came here."""
        self._stopped.set()


def claims_of(job: LLMTrainJob) -> list[str]:
    """Return the claims that a job's addresses name."""
    spec = job.spec
    addresses = [spec.checkpoint.store, *(source.uri for source in spec.data.sources)]
    if spec.data.tokenizer.uri:
        addresses.append(spec.data.tokenizer.uri)
    return sorted({claim for claim in (Uri.parse(address).claim for address in addresses) if claim})


def stop_on_signals(controller: LocalController) -> None:
    """Ctrl-C and SIGTERM stop the run gracefully. Call inside the event loop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, controller.stop)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _policy(records: Records) -> Policy:
    """Runs side by side on one machine need ports of their own for their rendezvous."""
    place = zlib.crc32(str(records.folder.absolute()).encode()) % RUNS_SIDE_BY_SIDE
    return Policy(
        status_period_seconds=STATUS_PERIOD_SECONDS,
        rendezvous_port_base=FIRST_PORT + place * PORTS_PER_RUN,
        rendezvous_port_span=PORTS_PER_RUN,
    )
