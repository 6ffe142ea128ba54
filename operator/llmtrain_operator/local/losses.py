"""The newest losses of a run, from the end of its store's metrics.jsonl."""

from __future__ import annotations

import json
import os
from pathlib import Path

METRICS = "metrics.jsonl"
BYTES_PER_LINE = 1024
"""More than a line has."""


def newest_losses(store: Path, count: int) -> tuple[float, ...]:
    """Return up to `count` losses, oldest first, one per step: of a step that was repeated, the last.

    Lines that cannot be read are left out; so is everything where the file cannot be.
    """
    by_step: dict[int, float] = {}
    for line in _tail(store / METRICS, 2 * count * BYTES_PER_LINE):
        try:
            record = json.loads(line)
            by_step[int(record["step"])] = float(record["loss"])
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(loss for _, loss in sorted(by_step.items())[-count:])


def _tail(path: Path, size: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            return file.read().splitlines()
    except OSError:
        return []
