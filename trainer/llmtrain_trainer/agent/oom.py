"""The kernel's count of OOM kills in this container's memory cgroup (v1 and v2)."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


class OomWatch:
    """Tells whether a process that SIGKILL ended was the OOM killer's: then the cgroup's counter rose."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._file = _counter_file(root)
        self._seen = self._count()

    def start_afresh(self) -> None:
        """Forget earlier kills: they are not the cause of what comes."""
        self._seen = self._count()

    def take(self) -> bool:
        """Return True once for every kill since the last call; reads the counter."""
        if self._count() > self._seen:
            self._seen += 1
            return True
        return False

    def _count(self) -> int:
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text().splitlines()
        except OSError:
            return 0
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdecimal():
                return int(value)
        return 0


def _counter_file(root: Path) -> Path | None:
    """Find the counter: below the path of our cgroup, or, inside a container, at the mount itself."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    candidates: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            candidates += [mount / below / "memory.oom_control", mount / "memory.oom_control"]
        elif number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
            candidates += [mount / below / "memory.events", mount / "memory.events"]
    return next((file for file in candidates if file.is_file()), None)
