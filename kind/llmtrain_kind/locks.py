"""File locks (flock): released by the kernel when their holder dies, however it dies."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[int]:
    """Hold an exclusive lock on ``path`` and yield its file descriptor.

    Prints ``waiting`` to stderr when somebody else holds the lock. The descriptor may be handed to a child process: the
    lock then lasts until the child has closed it too. The holder may delete the file as its last act: whoever waited
    for it takes a new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, waiting)
            if _is_file_of(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, waiting: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting:
            os.write(2, f"{waiting}\n".encode())
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_file_of(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
