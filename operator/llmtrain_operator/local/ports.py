"""Ports for one run: a block of its own, so that runs side by side on one machine never meet."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

PORTS_PER_RUN = 64
"""The first is the coordinator's, and holding it holds the block; the others are the rendezvous stores'."""
FIRST_PORT = 10_000
END_PORT = 32_768
"""Above begin the ports that Linux gives to outgoing connections: one of them could be taken while a controller is
away, and an agent that dials one in vain may, on the loopback device, get connected to itself."""
BLOCKS = (END_PORT - FIRST_PORT) // PORTS_PER_RUN


def candidate_ports(folder: Path, last: int | None) -> Iterator[int]:
    """Yield coordinator ports to try: the one that living agents dial, then others in an order of the folder's own."""
    if last is not None:
        yield last
    start = zlib.crc32(str(folder.absolute()).encode()) % BLOCKS
    for number in range(BLOCKS):
        port = FIRST_PORT + (start + number) % BLOCKS * PORTS_PER_RUN
        if port != last:
            yield port
