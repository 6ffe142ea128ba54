"""Queue, hub and reconciler put together: the part that a cluster and a laptop share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from llmtrain_api.sync import HOLD_SECONDS
from llmtrain_operator.coordinator.hub import Hub
from llmtrain_operator.runtime.backend import Backend, JobKey
from llmtrain_operator.runtime.reconciler import Decisions, Listener, Reconciler, Result
from llmtrain_operator.runtime.workqueue import RetryLaterError, WorkQueue

PULSE_SECONDS = 0.5


class Controller:
    """Looks at each job when there is news of it, when its plan asked for it, and every now and then."""

    def __init__(
        self,
        backend: Backend,
        decisions: Decisions,
        listener: Listener,
        *,
        may_act: Callable[[], Awaitable[None]] | None = None,
        resync_seconds: float = 300.0,
    ) -> None:
        """`may_act` returns when this process may write (it leads); all jobs are looked at every `resync_seconds`."""
        self._backend = backend
        self._listener = listener
        self._may_act = may_act
        self._resync_seconds = resync_seconds
        self.queue: WorkQueue[JobKey] = WorkQueue()
        self.hub = Hub(self.queue.add)
        self.reconciler = Reconciler(backend, self.hub, decisions, enqueue=self.queue.add, listener=listener)

    async def run(self, workers: int) -> None:
        """Work until `stop`; returns when the looks under way have ended."""
        resync = asyncio.create_task(self._resync(), name="resync")
        pulse = asyncio.create_task(self._feel_pulse(), name="pulse")
        try:
            await self.queue.run(self._handle, workers)
        finally:
            resync.cancel()
            pulse.cancel()

    def stop(self) -> None:
        """Start no further look at any job."""
        self.queue.close()

    async def _resync(self) -> None:
        while True:
            for key in self._backend.job_keys():
                self.queue.add(key)
            await asyncio.sleep(self._resync_seconds)

    async def _feel_pulse(self) -> None:
        """Notice that this process was starved or stopped. Agents ask at least every HOLD_SECONDS."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(PULSE_SECONDS)
            if loop.time() - before > PULSE_SECONDS + HOLD_SECONDS / 2:
                self.reconciler.stood_still()

    async def _handle(self, key: JobKey) -> None:
        if self._may_act is not None:
            await self._may_act()
        loop = asyncio.get_running_loop()
        started = loop.time()
        result: Result = "error"
        try:
            again = await self.reconciler.reconcile(key)
            result = "ok"
        except RetryLaterError:
            result = "retry"
            raise
        finally:
            self._listener.reconciled(result, loop.time() - started)
        if again is not None:
            self.queue.add(key, again)
