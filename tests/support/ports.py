"""Ports for tests."""

from __future__ import annotations

import random
import socket

FIRST, END = 2_000, 9_000
"""Below what Linux gives to outgoing connections, which could take a port between our look and its use, and below what
local runs take."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    while True:
        port = random.randrange(FIRST, END)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
