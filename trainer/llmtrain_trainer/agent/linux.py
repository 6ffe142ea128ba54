"""The few calls of the Linux kernel that Python's os module lacks (prctl(2))."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends; end at once if `parent` is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended between the fork and the line above
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends (PID 1 of a namespace is that anyway)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set /proc/PID/comm (15 characters at most)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def thread_count() -> int:
    """Return the number of threads of this process, also of those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def children() -> list[int]:
    """Return the process ids of all children of this process, zombies too."""
    me = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:  # ended meanwhile
            continue
        # comm may hold spaces and brackets: what follows the last ")" is "state ppid ..."
        if int(stat.rpartition(b")")[2].split()[1]) == me:
            found.append(int(entry.name))
    return found


def process_state(pid: int) -> str:
    """Return the letter of proc(5) for the state of a process (T: stopped); empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def started_with(pid: int, variable: str, value: str) -> bool:
    """Say whether the process was started with this environment variable; False where it is gone or not ours."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{variable}={value}".encode() in environment.split(b"\0")
