"""The agent's own log: JSON lines on stdout, or readable lines where stdout is a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from datetime import UTC, datetime
from typing import Any, TextIO


class EventLog:
    """Writes one line per event; fields that hold for all lines (job, worker, attempt) are bound once."""

    def __init__(self, stream: TextIO | None = None, **bound: Any) -> None:
        self._stream = stream or sys.stdout
        self._bound = bound
        self._readable = self._stream.isatty()

    def bind(self, **fields: Any) -> None:
        """Set fields of all later lines."""
        self._bound.update(fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        now = time.time()
        if self._readable:
            shown = " ".join(f"{key}={value}" for key, value in fields.items())
            line = f"{datetime.fromtimestamp(now).strftime('%H:%M:%S.%f')[:-3]} agent {level:7} {event} {shown}"
        else:
            stamp = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            record = {"time": stamp, "level": level, "event": event, **self._bound, **fields}
            line = json.dumps(record, default=str)
        with contextlib.suppress(OSError, ValueError):  # nobody reads our output any more: that must not end training
            # One write per line: the ranks write to the same stream.
            self._stream.write(line + "\n")
            self._stream.flush()
