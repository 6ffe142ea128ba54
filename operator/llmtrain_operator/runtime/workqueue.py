"""A keyed work queue: each key waits at most once, is worked on by one worker at a time, and backs off on failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 60.0

K = TypeVar("K", bound=Hashable)


class RetryLaterError(Exception):
    """Raised by a handler: try this key again, not sooner than the server asked for."""

    def __init__(self, message: str, not_before: float | None = None) -> None:
        """`not_before`: seconds from now."""
        super().__init__(message)
        self.not_before = not_before


class WorkQueue(Generic[K]):
    """Keys of things to look at. All methods belong to one event loop.

    A key added while it is being worked on is looked at once more afterwards: no news is lost, none is doubled.
    """

    def __init__(self) -> None:
        self._ready: deque[K] = deque()
        self._waiting: dict[K, float] = {}
        """Key to the loop time at which it became ready."""
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._wakeup = asyncio.Event()
        self._closed = False

    @property
    def depth(self) -> int:
        """How many keys wait for a worker now (those with a delay not counted)."""
        return len(self._ready) + len(self._again)

    @property
    def oldest_seconds(self) -> float:
        """How long the first key of the queue has waited; 0 where none waits."""
        return asyncio.get_running_loop().time() - self._waiting[self._ready[0]] if self._ready else 0.0

    def add(self, key: K, delay: float = 0.0) -> None:
        """Look at the key after `delay` seconds. Of several delays the earliest wins."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        due = max(loop.time() + delay, self._not_before.get(key, 0.0))
        if due <= loop.time():
            self._make_ready(key)
            return
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._make_ready, key)

    def failed(self, key: K, not_before: float | None = None) -> float:
        """Look at the key again after its backoff, which doubles with each failure in a row; return the seconds.

        News about the key may come first and are looked at at once, but never before `not_before` seconds have passed.
        """
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(count, 16), LAST_BACKOFF_SECONDS)
        if not_before is not None:
            not_before = min(not_before, LAST_BACKOFF_SECONDS)
            self._not_before[key] = asyncio.get_running_loop().time() + not_before
            delay = max(delay, not_before)
        self.add(key, delay)
        return delay

    def succeeded(self, key: K) -> None:
        """Start the next backoff from the beginning."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    async def run(self, handler: Callable[[K], Awaitable[None]], workers: int) -> None:
        """Work until `close`; then return when the handlers under way have ended.

        A handler that raises has its key tried again; nothing that it raises ends the queue.
        """
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(self._work(handler), name=f"worker-{number}")

    def close(self) -> None:
        """Let no handler start any more."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._wakeup.set()

    def _make_ready(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().time()
            self._ready.append(key)
            self._wakeup.set()

    async def _work(self, handler: Callable[[K], Awaitable[None]]) -> None:
        while not self._closed:
            if not self._ready:
                self._wakeup.clear()
                await self._wakeup.wait()
                continue
            key = self._ready.popleft()
            self._waiting.pop(key, None)
            self._active.add(key)
            try:
                await self._handle(handler, key)
            finally:
                self._active.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    with contextlib.suppress(RuntimeError):  # the loop may be closing
                        self.add(key)

    async def _handle(self, handler: Callable[[K], Awaitable[None]], key: K) -> None:
        try:
            await handler(key)
        except RetryLaterError as later:
            delay = self.failed(key, later.not_before)
            logger.warning("%s: %s; trying again in %.1f s", key, later, delay)
        except Exception:
            delay = self.failed(key)
            logger.exception("%s: the handler failed; trying again in %.1f s", key, delay)
        else:
            self.succeeded(key)
