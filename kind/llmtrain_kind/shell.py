"""Run a program and turn its failure into one readable error."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain_kind.errors import ClusterError


def run(
    command: Sequence[str | Path],
    *,
    text_in: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 120,
) -> str:
    """Run ``command`` and return its stdout; raise ClusterError with its last output lines when it fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=text_in if text_in is not None else "",
            capture_output=True,
            text=True,
            errors="replace",
            env=dict(env) if env is not None else None,
            timeout=timeout_seconds,
        )
    except FileNotFoundError:
        raise ClusterError(f"{words[0]}: no such program on this machine") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{shlex.join(words)}: still running after {timeout_seconds:.0f} s, stopped") from None
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise ClusterError(f"{shlex.join(words)}: exit code {done.returncode}\n{tail}")
    return done.stdout


def succeeds(command: Sequence[str | Path], timeout_seconds: float = 20) -> bool:
    """Whether ``command`` runs and exits with 0."""
    try:
        run(command, timeout_seconds=timeout_seconds)
    except ClusterError:
        return False
    return True


def last_lines(path: Path, count: int = 15) -> str:
    """The last lines of a log, indented, for an error message."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - 16384))
            lines = log.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return "    (no log)"
    return "\n".join("    " + line[:400] for line in lines) or "    (the log is empty)"
