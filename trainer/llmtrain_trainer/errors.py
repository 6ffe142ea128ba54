"""Errors with a meaning beyond the process: which exit code a failure ends in, and what is written for the agent."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path

from pydantic import ValidationError

from llmtrain_api.constants import ExitCode
from llmtrain_api.sync import RankError

MAX_MESSAGE = 4096
MAX_TRACEBACK = 16384

PEER_LOST_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connectfullmesh",
    "broken pipe",
    "gloo/transport",
    "application timeout",
    "socket timeout",
    "socket timed out",
    "timed out waiting",
    "wait timeout",
    "ncclremoteerror",
    "remote process exited",
    "failed to recv",
    "failed to send",
)
"""What torch says, in lower case, when another rank is gone: most of these come as a plain RuntimeError."""


class UserError(Exception):
    """The configuration or the data is wrong: a restart cannot help.

    Args:
        field: path in the spec, for instance `data.sources[0].uri`.
        value: what stands there.
        problem: what is wrong with it.
        allowed: what would be right.
        fix: what to do.
    """

    def __init__(self, field: str, value: object, problem: str, *, allowed: str, fix: str) -> None:
        self.field = field
        self.value = value
        super().__init__(f"spec.{field}: {value!r}: {problem}; allowed: {allowed}; fix: {fix}")


class NumericsError(Exception):
    """Loss or gradient is not finite."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read although the configuration is right."""


class StaleAttempt(Exception):
    """A newer attempt has the job's checkpoints: this one must not touch them, and has nothing left to do."""


class PeerLostError(Exception):
    """Another rank went away: a symptom, not a cause."""


def exit_code_of(error: BaseException) -> ExitCode | int:
    """Return the exit code that tells the operator what `error` means; 1 is a crash."""
    if isinstance(error, UserError | ValidationError):
        return ExitCode.USER_ERROR
    if isinstance(error, NumericsError):
        return ExitCode.NUMERICS
    if isinstance(error, CheckpointError):
        return ExitCode.CHECKPOINT
    if isinstance(error, StaleAttempt):
        return ExitCode.STALE_ATTEMPT
    if isinstance(error, PeerLostError) or _is_torch_peer_loss(error):
        return ExitCode.PEER_LOST
    return 1


def _is_torch_peer_loss(error: BaseException) -> bool:
    if type(error).__module__.startswith("torch") and type(error).__name__.startswith("Dist"):
        return True
    if not isinstance(error, RuntimeError | OSError):
        return False
    text = str(error).lower()
    return any(phrase in text for phrase in PEER_LOST_PHRASES)


def describe(error: BaseException) -> RankError:
    """Return what the agent reports of `error`: message, exception, traceback (the end of it), time."""
    stack = "".join(traceback.format_exception(error))
    return RankError(
        message=(str(error) or type(error).__name__)[:MAX_MESSAGE],
        exception=type(error).__name__[:256],
        traceback=stack[-MAX_TRACEBACK:],
        time=time.time(),
    )


def write_error_file(path: str, error: BaseException) -> None:
    """Write `error` for the agent, whole or not at all. Never raises: the exit code must survive a full disk."""
    if not path:
        return
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(describe(error).to_wire()), encoding="utf-8")
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
