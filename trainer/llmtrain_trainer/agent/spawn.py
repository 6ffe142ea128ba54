"""Starts the fork-server's process. Imports next to nothing: it is the first thing that an agent does."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple

AGENT_VARIABLE = "LLMTRAIN_AGENT_ID"
"""Marks the fork-server and all that comes from it, so that strays can be told from a user's own processes."""


class Spawned(NamedTuple):
    pid: int
    control: socket.socket
    """Our end of the connection; non-blocking."""


def spawn_forkserver(entry_name: str, agent_id: str) -> Spawned:
    """Start the process; it begins to import at once. May raise OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        module = "llmtrain_trainer.agent.forkserver"
        arguments = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), entry_name]
        # Its own session: a terminal's Ctrl-C is for the agent, which ends the ranks with grace.
        pid = os.posix_spawn(sys.executable, arguments, _environment(os.environ, agent_id), setsigmask=(), setsid=True)
    ours.setblocking(False)
    return Spawned(pid, ours)


def _environment(own: Mapping[str, str], agent_id: str) -> dict[str, str]:
    return {
        **own,
        "OMP_NUM_THREADS": own.get("OMP_NUM_THREADS", "1"),  # as torchrun does: ranks share the cores
        # numpy's OpenBLAS starts its threads at import, and a process with threads cannot fork safely.
        "OPENBLAS_NUM_THREADS": "1",
        AGENT_VARIABLE: agent_id,
    }
