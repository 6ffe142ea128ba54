"""Messages between the agent and its fork-server: a big-endian 32-bit length, then that many bytes of JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20
"""64 ranks with a spec of a megabyte each; more means that the stream is out of step."""


def encode(message: dict[str, Any]) -> bytes:
    """Return one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield every message that is complete with these bytes.

        Raises:
            ValueError: the length is impossible or the body is no JSON object.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ValueError(f"a frame holds {type(message).__name__}, not an object")
            yield message
