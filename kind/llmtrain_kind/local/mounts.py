"""Unmount what lies below our own folders. Lazily: a dead container's mounts may still be busy for a moment."""

import ctypes
import os
import re
from pathlib import Path

from llmtrain_kind.errors import ClusterError

_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def mounts_below(*folders: Path) -> list[str]:
    """Mount points at or below the folders, the newest first."""
    tops = [str(folder) for folder in folders]
    points = mount_points(Path("/proc/self/mountinfo").read_text())
    return [point for point in reversed(points) if any(point == top or point.startswith(top + "/") for top in tops)]


def mount_points(mountinfo: str) -> list[str]:
    """The mount points in the text of /proc/self/mountinfo (proc(5): field 5, blanks as octal escapes)."""
    raw = (line.split(" ")[4] for line in mountinfo.splitlines())
    return [re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point) for point in raw]


def unmount_below(*folders: Path) -> None:
    """Unmount everything at or below the folders; raises ClusterError if something stays."""
    for _ in range(5):
        points = mounts_below(*folders)
        for point in points:
            _libc.umount2(os.fsencode(point), _MNT_DETACH)
        if not points:
            return
    left = mounts_below(*folders)
    if left:
        raise ClusterError(f"cannot unmount {', '.join(left[:5])}")
