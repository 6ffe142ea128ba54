"""`llmtrain run --local`: the operator's own controller over processes of this machine, for one job."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmtrain_api.constants import TERMINAL_STATES, State
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.coordinator.server import CoordinatorServer
from llmtrain_operator.core.actions import Event, Plan
from llmtrain_operator.core.observed import Policy
from llmtrain_operator.core.plan import plan
from llmtrain_operator.local.backend import HOST, LocalBackend, LocalOptions
from llmtrain_operator.local.ports import PORTS_PER_RUN, candidate_ports
from llmtrain_operator.local.prepare import LocalRun, Prepared, prepare
from llmtrain_operator.local.records import LocalStateError, Records
from llmtrain_operator.runtime.backend import JobKey
from llmtrain_operator.runtime.controller import Controller
from llmtrain_operator.runtime.reconciler import Decisions, Result

logger = logging.getLogger(__name__)

STATUS_PERIOD_SECONDS = 1.0
"""A person is watching, and there is no API server to spare."""
LEAVE_SECONDS = 15.0
"""How long the workers of a finished job have to leave by themselves."""
SUSPEND_SECONDS = 5.0
"""How long a stop waits for the plan that stops the workers; then they are stopped without one."""
KILL_SECONDS = 10.0
STOPPED = "Stopped by the user: the same command goes on from the newest checkpoint"


@dataclass(frozen=True)
class LocalView:
    """What the run tells: every new status, every event, and remarks for a person."""

    on_status: Callable[[LLMTrainJob], None]
    on_event: Callable[[Event], None]
    on_note: Callable[[str], None]


class LocalController:
    """Runs one job to its end, or until it is told to stop. Whatever happens, `run` leaves no process behind."""

    def __init__(self, run: LocalRun, view: LocalView) -> None:
        """Needs a running event loop."""
        self._run = run
        self._view = view
        self._view_lost = False
        self._stopped = asyncio.Event()
        self._hurried = asyncio.Event()
        self._finished = asyncio.Event()
        self._suspended = asyncio.Event()
        self._backend: LocalBackend
        self._controller: Controller

    async def run(self) -> LLMTrainJobStatus:
        """Return the status at the end; its state is not terminal where the user stopped the run.

        Raises:
            LocalStateError: see `prepare`; or no port can be had.
        """
        prepared = prepare(self._run)
        try:
            return await self._control(prepared)
        except OSError as error:
            raise prepared.records.unwritable(error) from error
        finally:
            prepared.records.release()

    def stop(self) -> None:
        """Let ranks checkpoint, then end; the next run of the same manifest goes on. A second call kills them."""
        if self._stopped.is_set():
            self._hurried.set()
            return
        self._stopped.set()
        self._tell(self._view.on_note, "stopping: ranks write a checkpoint (once more: kill them)")

    async def _control(self, prepared: Prepared) -> LLMTrainJobStatus:
        options = LocalOptions(prepared.volumes, lambda event: self._tell(self._view.on_event, event))
        backend = LocalBackend(prepared.records, prepared.manifest, options, lambda key: self._look_at(key))
        self._backend = backend
        server, port = await self._listen(prepared.records)
        try:
            prepared.records.save_port(port)
            self._introduce(prepared, backend.adopt(f"http://{HOST}:{port}"))
            await self._work()
        finally:
            self._controller.stop()
            backend.stop_all(0.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(backend.all_ended(), KILL_SECONDS)
            await server.stop()
        if backend.job().status.state is State.SUSPENDED:
            await backend.write_status(
                backend.job().metadata, backend.job().status.model_copy(update={"message": STOPPED})
            )
        return backend.job().status

    async def _listen(self, records: Records) -> tuple[CoordinatorServer, int]:
        """Serve agents at the port that living ones dial, or where that was taken meanwhile, at another."""
        for port in candidate_ports(records.folder, records.port()):
            decisions = Decisions(plan=plan, spec_errors=lambda job: (), policy=_policy(port))
            self._controller = Controller(self._backend, decisions, self)
            server = CoordinatorServer(self._controller.hub, records.key(), HOST, port)
            try:
                await server.start()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise LocalStateError(f"port {port} of {HOST} cannot be had: {error}") from error
            else:
                return server, port
        raise LocalStateError(f"no port of {HOST} is free; stop some of the runs on this machine")

    def _introduce(self, prepared: Prepared, adopted: int) -> None:
        for claim, folder in prepared.volumes.items():
            self._tell(self._view.on_note, f"pvc://{claim} is {folder}")
        if adopted:
            self._tell(self._view.on_note, f"{adopted} workers of an earlier run are alive and go on")

    async def _work(self) -> None:
        controller = self._controller
        controller.reconciler.admit_all()
        working = asyncio.create_task(controller.run(workers=1))
        try:
            await _first_of(working, self._stopped.wait(), self._finished.wait())
            if working.done():
                working.result()
            if self._finished.is_set():
                await self._until_ended(LEAVE_SECONDS)
            else:
                await self._suspend()
        finally:
            controller.stop()
            await working

    async def _suspend(self) -> None:
        """Stop as a suspended job does: the attempt is closed without a failure, and the next run begins another."""
        grace = float(self._backend.job().spec.failure_policy.deadlines.stop_seconds)
        self._backend.suspend()
        self._look_at(self._backend.key)
        await _first_of(self._suspended.wait(), self._hurried.wait(), limit=SUSPEND_SECONDS)
        self._backend.stop_all(grace)  # those that the plan has not stopped, because its status could not be written
        await self._until_ended(grace + KILL_SECONDS)

    async def _until_ended(self, seconds: float) -> None:
        await _first_of(self._backend.all_ended(), self._hurried.wait(), limit=seconds)

    def _look_at(self, key: JobKey) -> None:
        self._controller.queue.add(key)

    def _tell(self, say: Callable[[Any], None], what: Any) -> None:
        """Tell the view; that it fails must not harm the run. Where nobody reads any more, the run stops."""
        if self._view_lost:
            return
        try:
            say(what)
        except OSError as error:
            self._view_lost = True
            logger.warning("the output cannot be written (%s): stopping", error)
            self.stop()
        except Exception:
            logger.exception("the view failed")

    # --- Listener

    def reconciled(self, result: Result, seconds: float) -> None:
        """Nobody counts here."""

    def decided(self, key: JobKey, before: LLMTrainJobStatus, plan: Plan) -> None:
        """Show a new status; a terminal one ends the run."""
        if plan.status_changed:
            self._tell(self._view.on_status, self._backend.job())
        if plan.status.state in TERMINAL_STATES:
            self._finished.set()
        if plan.status.state is State.SUSPENDED or self._finished.is_set():
            self._suspended.set()

    def forgotten(self, key: JobKey) -> None:
        """A local job cannot be deleted from outside."""

    def unreadable(self, key: JobKey) -> None:
        """Stop, although the manifest was read before it came here."""
        self.stop()


def stop_on_signals(controller: LocalController) -> None:
    """Ctrl-C, SIGTERM and a closed terminal stop the run gracefully. Call inside the event loop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            asyncio.get_running_loop().add_signal_handler(number, controller.stop)


async def _first_of(*awaitables: Any, limit: float | None = None) -> None:
    """Return when one of these is done, or after `limit` seconds. Tasks given as such go on, others are cancelled."""
    tasks = [a if isinstance(a, asyncio.Task) else asyncio.create_task(a) for a in awaitables]
    await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    for task, given in zip(tasks, awaitables, strict=True):
        if task is not given:
            task.cancel()


def _policy(port: int) -> Policy:
    """The coordinator's port is the first of the run's block; the others are for rendezvous, one for each attempt."""
    return Policy(
        status_period_seconds=STATUS_PERIOD_SECONDS,
        rendezvous_port_base=port + 1,
        rendezvous_port_span=PORTS_PER_RUN - 1,
    )
