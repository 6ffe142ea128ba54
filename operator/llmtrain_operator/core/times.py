"""Unix seconds to and from the timestamps of the API (RFC 3339, UTC, milliseconds)."""

from __future__ import annotations

from datetime import UTC, datetime

EARLIEST = 0.0
LATEST = 253402300799.0
"""The last second of the year 9999: what a timestamp can still say."""


def to_timestamp(seconds: float) -> str:
    """Return the RFC 3339 form, milliseconds kept; what lies outside of the years 1970..9999 is moved to their edge."""
    bounded = min(max(seconds, EARLIEST), LATEST) if seconds == seconds else EARLIEST
    moment = datetime.fromtimestamp(round(bounded, 3), tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def from_timestamp(text: str | None) -> float | None:
    """Return Unix seconds, or None where there is no timestamp or it cannot be read."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


def milliseconds(seconds: float) -> int:
    """Return Unix milliseconds, the very ones that a timestamp of this moment says."""
    return round((from_timestamp(to_timestamp(seconds)) or 0.0) * 1000)
