"""Messages of bounded length: the API refuses longer ones, and a refused status write would block the job."""

from __future__ import annotations

import signal

MESSAGE_LENGTH = 1024
SHORT_LENGTH = 256


def shorten(text: str, limit: int = MESSAGE_LENGTH) -> str:
    """Return the text on one line, cut to `limit` characters with a mark where something is missing."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def signal_name(number: int) -> str:
    """Return for instance 'signal 9 (SIGKILL)'."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def seconds(value: float) -> str:
    """Return a duration for people: '0.4 s', '75 s'."""
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def count(number: int, noun: str) -> str:
    """Return '1 step', '2 steps'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
