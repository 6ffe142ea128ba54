"""A file of whole lines, to which attempt after attempt appends."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


class LineFile:
    """Appends lines with one write each. A full disk costs lines and one warning, never the run.

    A line that was cut short, by a kill or by a full disk, is ended before the next one is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._handle).st_size
        self._torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
        self._warned = False

    def append(self, line: str) -> None:
        data = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        try:
            written = os.write(self._handle, data)
            self._torn = written != len(data) and (written > 0 or self._torn)
        except OSError as error:
            if not self._warned:
                log.warning("%s cannot be written, lines are lost: %s", self._path, error)
            self._warned = True

    def close(self) -> None:
        """Make what was written durable."""
        with contextlib.suppress(OSError):
            os.fsync(self._handle)
        os.close(self._handle)
