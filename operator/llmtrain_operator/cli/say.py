"""What commands say to people when they cannot go on."""

from __future__ import annotations


class UsageError(Exception):
    """The command was given something it cannot use; the message says what, and the fix. Exit code 2."""
