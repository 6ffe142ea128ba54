"""A guard for deleting folders: what is mounted below one may be somebody else's files."""

import re
from pathlib import Path


def mounts_below(folder: Path) -> list[str]:
    """Mount points at or below the folder, as this process sees them."""
    top = str(folder)
    points = mount_points(Path("/proc/self/mountinfo").read_text())
    return [point for point in points if point == top or point.startswith(top + "/")]


def mount_points(mountinfo: str) -> list[str]:
    """The mount points in the text of /proc/self/mountinfo (proc(5): field 5, blanks as octal escapes)."""
    raw = (line.split(" ")[4] for line in mountinfo.splitlines())
    return [re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point) for point in raw]
