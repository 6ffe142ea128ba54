"""Whether a checkpoint fits where it is to be written: a full store is foreseen where it can be, and named."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """The free space of a store against one checkpoint."""

    root: Path
    needed_bytes: int
    """Of the whole checkpoint at least: nothing that would fit is refused."""

    def free_bytes(self) -> int | None:
        """Return what may be written there; None where the file system does not say."""
        try:
            usage = shutil.disk_usage(self.root)
        except OSError:
            return None
        return usage.free if usage.total else None  # some network file systems count nothing

    def is_short(self) -> bool:
        """Tell whether it cannot fit."""
        free = self.free_bytes()
        return free is not None and free < self.needed_bytes

    def explain(self, problem: str, uri: str) -> str:
        """Return the cause in words: torch's own of a full disk is a position in a file."""
        free = self.free_bytes()
        if free is None:
            return problem
        if free >= self.needed_bytes:
            return f"{problem} ({free >> 20} MiB free)"
        return (
            f"spec.checkpoint.store {uri} is full: {free / 2**20:.1f} MiB free, {self.needed_bytes / 2**20:.1f} MiB "
            f"needed; fix: make room there, lower spec.checkpoint.keep, or use a larger volume ({problem})"
        )
