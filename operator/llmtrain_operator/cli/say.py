"""What commands say to people when they cannot go on."""

from __future__ import annotations

import contextlib
import io
import sys


class UsageError(Exception):
    """The command was given something it cannot use; the message says what, and the fix. Exit code 2."""


def complain(text: str) -> None:
    """Write to standard error. Where nobody can read that, the exit code has to do."""
    if sys.stderr is not None:  # closed; print would take standard output in its place
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def escape_what_cannot_be_shown() -> None:
    """Write \\u... for what the terminal's encoding lacks: users' texts are shown, and may hold anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def one_line(error: BaseException) -> str:
    """Return an exception's text in one line; its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
