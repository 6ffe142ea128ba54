"""Keeps the caches true: kopf's watches in a thread of their own, and lists that repair what watches cannot tell.

kopf ends all tasks of its event loop when it stops, and stops for good on some errors of a watch. So it gets its own
loop in its own thread, and a new one when it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import kopf
from kubernetes import client as official

from llmtrain_operator.kube.errors import ApiError, ForbiddenError, NotFoundError
from llmtrain_operator.kube.resources import Resource
from llmtrain_operator.runtime.handlers import Feed, kopf_registry, kopf_settings

logger = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
AFTER_RELIST_SECONDS = 0.5
"""A watch that listed anew is followed by our own list after this, because a list does not tell what was deleted."""
AFTER_START_SECONDS = 3.0
LONGEST_RETRY_SECONDS = 5.0


class Informer:
    """Feeds job and pod events into the caller's event loop."""

    def __init__(
        self,
        configuration: official.Configuration,
        feed: Feed,
        resync: Callable[[], Awaitable[int]],
        *,
        namespaces: Sequence[str] = (),
        resync_seconds: float = 300.0,
        on_repaired: Callable[[int], None] = lambda objects: None,
    ) -> None:
        """`on_repaired` is told how many objects a list showed in a state that no watch had told."""
        self._configuration = configuration
        self._feed = feed
        self._resync = resync
        self._namespaces = tuple(namespaces)
        self._resync_seconds = resync_seconds
        self._on_repaired = on_repaired
        self._heard_at = asyncio.get_running_loop().time()
        self._stale = asyncio.Event()
        self.synced = asyncio.Event()
        """Set once everything was listed for the first time."""
        self._kopf: _KopfThread | None = None

    @property
    def is_watching(self) -> bool:
        """Whether the watches' thread is alive."""
        return self._kopf is not None and self._kopf.is_alive

    @property
    def age_seconds(self) -> float:
        """Time since a watch or a list told anything."""
        return asyncio.get_running_loop().time() - self._heard_at

    async def run(self) -> None:
        """Keep the caches true, for ever."""
        await self._list()
        self.synced.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._repair())

    async def stop(self) -> None:
        """End the watches."""
        if self._kopf is not None:
            await self._kopf.stop()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._kopf = _KopfThread(self._configuration, self._receive, self._namespaces)
                loop.call_later(AFTER_START_SECONDS, self._stale.set)
                error = await self._kopf.ended()
                logger.error("the watches ended (%s) and are started anew", error or "no error")
                await asyncio.sleep(RESTART_SECONDS)
        finally:
            await self.stop()

    def _receive(self, resource: Resource, event_type: str | None, obj: dict[str, Any]) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if event_type is None:
            self._stale.set()
        self._feed(resource, event_type, obj)

    async def _repair(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._resync_seconds):
                    await self._stale.wait()
            await asyncio.sleep(AFTER_RELIST_SECONDS)
            self._stale.clear()
            repaired = await self._list()
            if repaired:
                self._on_repaired(repaired)
                logger.info("a list showed %d objects in a state that no watch had told", repaired)

    async def _list(self) -> int:
        """List until it succeeds; say what is missing where a person has to act."""
        delay = 0.25
        while True:
            try:
                repaired = await self._resync()
                self._heard_at = asyncio.get_running_loop().time()
                return repaired
            except NotFoundError as error:
                logger.error("the CustomResourceDefinition of LLMTrainJob is not installed: %s", error)
            except ForbiddenError as error:
                logger.error("the operator's role does not allow it to list jobs and pods: %s", error)
            except ApiError as error:
                logger.warning("jobs and pods cannot be listed: %s", error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_RETRY_SECONDS)


class _KopfThread:
    """One life of kopf."""

    def __init__(self, configuration: official.Configuration, feed: Feed, namespaces: tuple[str, ...]) -> None:
        self._main = asyncio.get_running_loop()
        self._feed = feed
        self._namespaces = namespaces
        self._registry = kopf_registry(configuration, self._hand_over, with_nodes=not namespaces)
        self._ended: asyncio.Future[BaseException | None] = self._main.create_future()
        self._own: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._live, name="kopf", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def ended(self) -> BaseException | None:
        """Return what kopf died of."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Ask kopf to end, and give it a moment."""
        if self._own is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended already
                self._own.call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self.ended()

    def _hand_over(self, resource: Resource, event_type: str | None, obj: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the main loop has ended: nobody listens any more
            self._main.call_soon_threadsafe(self._feed, resource, event_type, obj)

    def _live(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._operate())
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):
            self._main.call_soon_threadsafe(self._tell, error)

    async def _operate(self) -> None:
        self._own, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await kopf.operator(
            registry=self._registry,
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
        )

    def _tell(self, error: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)
