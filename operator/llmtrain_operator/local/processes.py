"""Processes of this machine: who they are, whether they live, and how they are signalled without mistaking them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from llmtrain_api.constants import Env

AGENT_MODULE = "llmtrain_trainer.agent.main"
KILL_SECONDS = 10.0


def process_start(pid: int) -> int | None:
    """Return when a living process started, in ticks after boot; None where it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def open_process(pid: int, started: int) -> int | None:
    """Return a descriptor (pidfd) of the process that had this pid from that time on; None where it is gone.

    Signals sent by the descriptor cannot reach another process that got the pid later.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if process_start(pid) != started:
        os.close(descriptor)
        return None
    return descriptor


def marker_of(workers_folder: Path) -> bytes:
    """Return how the environment entry begins by which agents of this folder are known."""
    return f"{Env.WORK_DIR}={workers_folder.absolute()}/".encode()


def agents_below(workers_folder: Path) -> list[int]:
    """Return the pids of all agents that work in this folder, also of those that no record tells of."""
    marker = marker_of(workers_folder)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _is_agent(Path("/proc", entry), marker):
            found.append(int(entry))
    return found


def kill_agents(workers_folder: Path, spare: frozenset[int] = frozenset()) -> int:
    """Kill the agents of this folder but those spared, and with each its ranks; return how many there were."""
    pids = [pid for pid in agents_below(workers_folder) if pid not in spare]
    for pid in pids:
        with contextlib.suppress(OSError):
            _kill(pid, marker_of(workers_folder))
    return len(pids)


def _is_agent(process: Path, marker: bytes) -> bool:
    try:
        if AGENT_MODULE.encode() not in (process / "cmdline").read_bytes().split(b"\0"):
            return False
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return False
    return any(variable.startswith(marker) for variable in variables)


def _kill(pid: int, marker: bytes) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        if not _is_agent(Path("/proc", str(pid)), marker):  # it has ended, and another got its pid
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], KILL_SECONDS)  # readable once it has ended
    finally:
        os.close(descriptor)
