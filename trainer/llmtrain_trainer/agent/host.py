"""The agent's side of the fork-server: starts it, talks to it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.frames import Decoder, encode
from llmtrain_trainer.agent.launch import RankStart
from llmtrain_trainer.agent.spawn import Spawned

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0


class HostListener(Protocol):
    """What the host tells; all calls come from the event loop."""

    def warmed(self) -> None: ...

    def started(self, attempt: int, pids: Sequence[int]) -> None: ...

    def refused(self, attempt: int, error: str) -> None: ...

    def exited(self, pid: int, status: int, at: float) -> None: ...

    def lost(self, why: str, cold_deaths: int) -> None:
        """Tell that the fork-server died, with all its ranks (told before); `cold_deaths` in a row while importing."""


class RankHost:
    """One fork-server at a time. A dead one is replaced after a growing pause."""

    def __init__(self, spawn: Callable[[], Spawned], first: Spawned, log: EventLog) -> None:
        """Take over the first process, which was spawned as early as possible; `spawn` makes the later ones."""
        self.warm = False
        self._spawn = spawn
        self._log = log
        self._listener: HostListener | None = None
        self._process = first
        self._link: _Link | None = _Link(self)
        self._status = 0
        self._reaped = False
        self._ranks: set[int] = set()
        self._cold_deaths = 0
        self._closing = False
        self._respawn: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def attach(self, listener: HostListener) -> None:
        """Listen to the first process."""
        self._listener = listener
        await self._connect()

    async def _connect(self) -> None:
        link = self._link
        assert link
        await asyncio.get_running_loop().create_connection(lambda: link, sock=self._process.control)

    def start(self, attempt: int, starts: Sequence[RankStart]) -> None:
        """Ask for ranks; `started` or `refused` answers, or `lost`."""
        self._send(kind="start", attempt=attempt, ranks=[start.to_message() for start in starts])

    def signal(self, pid: int, number: signal.Signals, group: bool) -> None:
        """Signal a rank, or all processes of its group; nothing happens where it has ended."""
        self._send(kind="signal", pids=[pid], number=int(number), group=group)

    def close(self) -> None:
        """End the fork-server, and with it all ranks."""
        self._closing = True
        if self._respawn:
            self._respawn.cancel()
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)

    def child_ended(self, pid: int, status: int) -> None:
        """Take in that the agent reaped this child: the fork-server, a rank that it left behind, or anything."""
        if pid == self.pid:
            self._reaped, self._status = True, status
            self._check_lost()
        elif pid in self._ranks:
            self._rank_exited(pid, status, time.time())

    def _send(self, **message: Any) -> None:
        if self._link and self._link.transport:
            self._link.transport.write(encode(message))

    def received(self, message: dict[str, Any]) -> None:
        """Handle one message of the fork-server."""
        assert self._listener
        kind = message["kind"]
        if kind == "warm":
            self._on_warm(message)
        elif kind == "started":
            self._ranks.update(message["pids"])
            self._listener.started(message["attempt"], message["pids"])
        elif kind == "refused":
            self._listener.refused(message["attempt"], message["error"])
        elif kind == "exited":
            self._rank_exited(message["pid"], message["status"], message["at"])

    def _on_warm(self, message: dict[str, Any]) -> None:
        assert self._listener
        self._cold_deaths = 0
        self.warm = True
        self._log.info("forkserver_warm", pid=self.pid, seconds=round(message["seconds"], 3))
        if message["threads"] != 1:
            self._log.error("forkserver_has_threads", threads=message["threads"], danger="a forked rank may hang")
        if message["refused"]:
            self._log.warning("forkserver_modules_refused", modules=message["refused"])
        self._listener.warmed()

    def _rank_exited(self, pid: int, status: int, at: float) -> None:
        assert self._listener
        if pid in self._ranks:
            self._ranks.discard(pid)
            self._listener.exited(pid, status, at)

    def link_lost(self) -> None:
        """Handle the end of the connection; everything that was sent has been received before."""
        self._link = None
        if not self._reaped and not self._closing:
            os.kill(self.pid, signal.SIGKILL)  # without its connection it is of no use
        self._check_lost()

    def _check_lost(self) -> None:
        """The fork-server is lost once its messages are read and it is reaped: nothing comes from it any more."""
        if not self._reaped or self._link or self._closing:
            return
        assert self._listener
        for pid in list(self._ranks):
            self._end_orphaned_rank(pid)
        if not self.warm:
            self._cold_deaths += 1
        self.warm = False
        code = os.waitstatus_to_exitcode(self._status)
        why = f"the fork-server ended by signal {-code}" if code < 0 else f"the fork-server exited with code {code}"
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2**self._cold_deaths)
        self._log.error("forkserver_lost", pid=self.pid, why=why, cold_deaths=self._cold_deaths, restart_in=delay)
        self._respawn = asyncio.get_running_loop().create_task(self._start_again(delay))
        self._listener.lost(why, self._cold_deaths)

    def _end_orphaned_rank(self, pid: int) -> None:
        """The kernel kills the ranks with their parent and makes us their parent; be sure of both."""
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                os.kill(pid, signal.SIGKILL)
        except ChildProcessError:  # reaped by the fork-server, which died before it could tell
            self._rank_exited(pid, signal.SIGKILL, time.time())

    async def _start_again(self, delay: float) -> None:
        await asyncio.sleep(delay)
        while True:
            try:
                self._process = self._spawn()
                break
            except OSError as error:  # no memory, no process ids: that may pass
                self._log.error("forkserver_not_started", error=str(error))
                await asyncio.sleep(_LONGEST_DELAY)
        self._link, self._reaped = _Link(self), False
        await self._connect()


class _Link(asyncio.Protocol):
    """The connection to one fork-server."""

    def __init__(self, host: RankHost) -> None:
        self._host = host
        self._decoder = Decoder()
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._host.received(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._host.link_lost()
