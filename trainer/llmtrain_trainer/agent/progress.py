"""Rank 0 tells its steps here: a Unix datagram socket with one sync.Progress as JSON per datagram."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from llmtrain_api.sync import Progress
from llmtrain_trainer.agent.eventlog import EventLog

_DATAGRAM_BYTES = 1 << 16


class ProgressInbox:
    """Keeps the newest progress of the attempt that runs now."""

    def __init__(self, path: Path, log: EventLog, arrived: Callable[[], None]) -> None:
        """Bind the socket.

        Raises:
            OSError: the path cannot be bound (more than 107 bytes long, or the folder is not ours).
        """
        self.path = path
        self.newest: Progress | None = None
        self._attempt = 0
        self._previous_step = -1
        self._log = log
        self._arrived = arrived
        self._complained = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have `arrived` called from now on."""
        loop.add_reader(self._socket, self._readable)
        self._loop = loop

    def expect(self, attempt: int) -> None:
        """From now on only this attempt counts."""
        self.drain()
        if self.newest:  # an attempt that made no step leaves what the one before it reached
            self._previous_step = self.newest.step
        self._attempt = attempt
        self.newest = None
        self._complained = False

    def drain(self) -> bool:
        """Take in all that has been sent; return whether there was news."""
        news = False
        while True:
            try:
                data = self._socket.recv(_DATAGRAM_BYTES)
            except (BlockingIOError, InterruptedError):
                return news
            news = self._take(data) or news

    def close(self) -> None:
        if self._loop:
            self._loop.remove_reader(self._socket)
        self._socket.close()

    def _readable(self) -> None:
        if self.drain():
            self._arrived()

    def _take(self, data: bytes) -> bool:
        try:
            progress = Progress.model_validate_json(data)
        except ValidationError as error:
            if not self._complained:  # once per attempt: every step would say the same
                self._log.warning("progress_malformed", error=str(error), data=data[:200].decode(errors="replace"))
                self._complained = True
            return False
        if progress.attempt != self._attempt:  # the last words of an older attempt
            return False
        self.newest = progress.model_copy(update={"previous_step": self._previous_step})
        return True
