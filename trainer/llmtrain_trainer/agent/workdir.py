"""The folder of one start of the agent: its progress socket and the ranks' error files."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "agent-"
_LONGEST_SOCKET_PATH = 107
"""sockaddr_un holds 108 bytes with the closing zero."""


class WorkDir:
    """Unique to this start, locked for its life; folders that killed agents left are removed."""

    def __init__(self, root: Path, agent_id: str) -> None:
        """Make the folder.

        Raises:
            OSError: `root` cannot be written.
        """
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        self.path = root / f"{_PREFIX}{agent_id}"
        self.path.mkdir()
        # Held until this process ends, however it ends; not inherited by the fork-server.
        self._lock = _lock(self.path)
        self._socket_folder: Path | None = None
        self._attempt: Path | None = None

    def socket_path(self) -> Path:
        """Return where the progress socket goes: elsewhere where a path in the folder is too long for one."""
        path = self.path / "progress.sock"
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            self._socket_folder = Path(tempfile.mkdtemp(prefix="llmtrain-"))
            path = self._socket_folder / "progress.sock"
        return path

    def attempt_folder(self, attempt: int) -> Path:
        """Return where the error files of an attempt go."""
        return self.path / f"attempt-{attempt}"

    def begin(self, attempt: int) -> None:
        """Make the attempt's folder, and remove the one before. May raise OSError."""
        if self._attempt:
            shutil.rmtree(self._attempt, ignore_errors=True)
        self._attempt = self.attempt_folder(attempt)
        self._attempt.mkdir()

    def remove(self) -> None:
        for folder in (self.path, self._socket_folder):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder; return None where a living agent holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_stale(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(folder)
        except OSError:  # another agent removes it, or it is not ours
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
