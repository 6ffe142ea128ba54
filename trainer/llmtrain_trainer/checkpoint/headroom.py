"""How much more memory this container may take: past that the kernel kills it, long before /dev/shm is full."""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),  # cgroup v2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_NO_LIMIT = 1 << 60
"""cgroup v1 says it by a number as large as it has."""


def headroom_bytes(root: Path = CGROUPS) -> int | None:
    """Return what may still be taken; None where there is no limit, or nobody says."""
    for limit, used, statistics, reclaimable in _FILES:
        try:
            bound = int((root / limit).read_text())
            taken = int((root / used).read_text())
            lines = (line.split() for line in (root / statistics).read_text().splitlines())
            given_back = next((int(value) for name, value in lines if name == reclaimable), 0)
        except (OSError, ValueError):  # not this version; or `max`
            continue
        return None if bound >= _NO_LIMIT else bound - taken + given_back
    return None
