"""The fork-server: one thread that has imported everything a rank needs, and forks ranks from itself.

`python -m llmtrain_trainer.agent.forkserver FD AGENT_PID ENTRY` talks over the socket FD (frames.py):

    agent -> start  {attempt, ranks: [{name, environment, errorFile}]}    all or none are started
             signal {pids, number, group}                              group: the whole process group of each
    back  -> warm   {seconds, threads, refused}                         once; nothing is started before
             started {attempt, pids} | refused {attempt, error}
             exited {pid, status, at}                                   status as of wait(2), at in Unix seconds

A process forked from one with threads may hold a lock for ever, and CUDA and process groups do not survive a fork: so
this process never starts a thread, never touches CUDA and never opens a process group.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

from llmtrain_trainer.agent import linux
from llmtrain_trainer.agent.frames import Decoder, encode
from llmtrain_trainer.agent.rank_process import become_rank
from llmtrain_trainer.agent.settings import DEFAULT_RANK_ENTRY
from llmtrain_trainer.warmup import modules_after_one_step


class ForkServer:
    """Serves one agent until the socket closes; then every rank is killed."""

    def __init__(self, control: socket.socket, entry_name: str) -> None:
        self._control = control
        self._entry_name = entry_name
        self._decoder = Decoder()
        self._ranks: set[int] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Return when the agent has gone."""
        sources = select.poll()
        sources.register(self._control, select.POLLIN)
        sources.register(self._wake_read, select.POLLIN)
        try:
            self._send(kind="warm", **warm_up(self._entry_name))
            while True:
                for source, _ in sources.poll():
                    if source == self._wake_read:
                        self._drain_wakeups()
                    elif not self._receive():
                        return
                self._reap()
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            self._signal(list(self._ranks), signal.SIGKILL, group=True)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def _receive(self) -> bool:
        data = self._control.recv(1 << 16)
        for message in self._decoder.feed(data):
            if message["kind"] == "start":
                self._start(message)
            else:
                self._signal(message["pids"], message["number"], message["group"])
        return bool(data)

    def _start(self, message: dict[str, Any]) -> None:
        pids: list[int] = []
        try:
            for start in message["ranks"]:
                pids.append(self._fork(start))
        except OSError as error:
            self._signal(pids, signal.SIGKILL, group=True)
            self._send(kind="refused", attempt=message["attempt"], error=f"cannot start a process: {error}")
        else:
            self._send(kind="started", attempt=message["attempt"], pids=pids)

    def _fork(self, start: dict[str, Any]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            become_rank(start, self._entry_name, parent)
        self._ranks.add(pid)
        return pid

    def _signal(self, pids: list[int], number: int, group: bool) -> None:
        """Signal ranks that are not reaped yet: their process ids cannot belong to anybody else."""
        for pid in pids:
            if pid not in self._ranks:
                continue
            if group:
                with contextlib.suppress(ProcessLookupError):  # it has not reached setsid yet
                    os.killpg(pid, number)
            os.kill(pid, number)

    def _reap(self) -> None:
        while self._ranks:
            # Look first and reap later: while the rank is a zombie, nobody else can get the number of its group.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)  # what the rank started must not outlive it
            pid, status = os.waitpid(ended.si_pid, 0)
            self._ranks.discard(pid)
            self._send(kind="exited", pid=pid, status=status, at=time.time())

    def _send(self, **message: Any) -> None:
        self._control.sendall(encode(message))


def _ignore(number: int, frame: FrameType | None) -> None:
    """Only the wakeup descriptor matters; with SIG_IGN the kernel would reap the ranks itself."""


def warm_up(entry_name: str) -> dict[str, Any]:
    """Import what a rank will need, and say how it went. A module that refuses is the rank's to report, not ours."""
    began = time.monotonic()
    refused: dict[str, str] = {}
    gc.disable()  # imports make little garbage, and looking for it takes a sixth of their time
    for module in _modules(entry_name, refused):
        _import(module, refused)
    gc.freeze()  # else the first collection in a rank writes to, and so copies, every inherited page
    gc.enable()
    return {"seconds": time.monotonic() - began, "threads": linux.thread_count(), "refused": refused}


def _modules(entry_name: str, refused: dict[str, str]) -> list[str]:
    entry_module = entry_name.partition(":")[0]
    if entry_name != DEFAULT_RANK_ENTRY:
        return [entry_module]
    try:
        return [entry_module, *modules_after_one_step()]
    except RuntimeError as error:  # ranks will start slowly, and say themselves what is wrong
        refused["what one step needs"] = str(error)
        return [entry_module]


def _import(module: str, refused: dict[str, str]) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        refused[module] = f"{type(error).__name__}: {error}"[:300]


def main(arguments: list[str]) -> None:
    """Entry point of the process; see the module's docstring for the arguments."""
    descriptor, agent, entry_name = int(arguments[0]), int(arguments[1]), arguments[2]
    linux.die_with_parent(agent)
    linux.set_process_name("lt-forkserver")
    with socket.socket(fileno=descriptor) as control:
        control.set_inheritable(False)
        ForkServer(control, entry_name).serve()
    os._exit(0)  # an orderly end of an interpreter with torch in it may abort, and says so in the worker's log


if __name__ == "__main__":
    main(sys.argv[1:])
