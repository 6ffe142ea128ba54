"""Background processes known by pid AND start time, so that a recycled pid is never mistaken for ours.

A process writes its own record before it becomes the program (see ``_LAUNCHER``): there is no moment at which it runs
unrecorded, whenever its parent is killed.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmtrain_kind.errors import ClusterError

# stdin is the cluster's lock: it stays held until the record is in place, so whoever takes the lock next sees every
# process of the one before. `exec` keeps pid and start time.
_LAUNCHER = """
record=$1; shift
cat /proc/$$/stat /proc/sys/kernel/random/boot_id > "$record.tmp" && mv "$record.tmp" "$record" || exit 125
exec "$@" < /dev/null
"""


@dataclass(frozen=True)
class Process:
    """One process: its pid, its start time in clock ticks since boot, and the boot it belongs to."""

    pid: int
    start_ticks: int
    boot_id: str

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        if self.boot_id != _boot_id():
            return False
        stat = _stat(self.pid)
        return stat is not None and stat[1] == self.start_ticks and stat[0] not in "ZX"

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to this very process; nothing happens if it is gone."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def find_process(pid: int) -> Process | None:
    """The process that has this pid now, or None."""
    stat = _stat(pid)
    return Process(pid, stat[1], _boot_id()) if stat else None


def read_record(path: Path) -> Process | None:
    """The process a record file names, alive or not; None when there is no readable record."""
    try:
        lines = path.read_text().splitlines()
        return Process(int(lines[0].split(" ", 1)[0]), parse_stat(lines[0])[1], lines[1].strip())
    except (OSError, IndexError, ValueError):
        return None


def start(command: Sequence[str | Path], record: Path, log: Path, lock: int, env: Mapping[str, str]) -> None:
    """Start ``command`` in its own session with its output appended to ``log``; return once its record is written.

    ``lock`` is the descriptor of the cluster's lock, ``env`` is added to this process's environment.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", _LAUNCHER, "sh", str(record), *map(str, command)],
            stdin=lock,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            start_new_session=True,
            cwd="/",
        )
    deadline = time.monotonic() + 30
    while not record.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(f"{command[0]} did not start; its log: {log}")
        time.sleep(0.002)
    # The child outlives us on purpose; without this Python warns that it was not waited for.
    child.returncode = 0


def end_all(processes: Iterable[Process], seconds: float = 20) -> None:
    """Kill processes (SIGKILL) and wait until they are gone."""
    left = list(processes)
    for process in left:
        process.kill()
    deadline = time.monotonic() + seconds
    while left := [process for process in left if process.alive()]:
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {sorted(p.pid for p in left)} do not end after SIGKILL")
        time.sleep(0.01)


def parse_stat(text: str) -> tuple[str, int]:
    """State letter and start time (clock ticks since boot) of a /proc/PID/stat line (proc(5), fields 3 and 22)."""
    # The program's name (field 2) may hold blanks and parentheses: count from the last one.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, IndexError, ValueError):
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
