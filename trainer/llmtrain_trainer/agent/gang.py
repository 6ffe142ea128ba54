"""The ranks of one attempt on this worker, and what is to be reported of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmtrain_api.sync import RankError, RankReport
from llmtrain_trainer.agent.launch import RankStart

_ERROR_FILE_BYTES = 1 << 20


@dataclass
class Rank:
    """One trainer process, from its fork to its reaping."""

    local_rank: int
    global_rank: int
    error_file: Path
    pid: int
    exit_code: int | None = None
    signal: int | None = None
    exited_at: float | None = None
    """Unix seconds; None while it runs."""
    by_agent: bool = False
    oom_killed: bool = False
    error: RankError | None = None
    kill_at: float | None = None
    """Loop time at which SIGKILL is due; None while nobody wants the rank to end."""
    killed: bool = False
    """SIGKILL was sent."""
    why: str = ""
    """Why the agent ended it of its own accord; empty where it was ordered to."""

    @property
    def running(self) -> bool:
        return self.exited_at is None

    def ended(self, status: int, at: float) -> None:
        """Take in a wait(2) status; it came by us if we had signalled the rank before."""
        code = os.waitstatus_to_exitcode(status)
        self.exit_code, self.signal = (code, None) if code >= 0 else (None, -code)
        self.exited_at = at
        self.by_agent = self.kill_at is not None
        self.error = read_error(self.error_file) or (RankError(message=self.why, time=at) if self.why else None)

    def report(self) -> RankReport:
        return RankReport(
            local_rank=self.local_rank,
            global_rank=self.global_rank,
            pid=self.pid,
            state="running" if self.running else "exited",
            exit_code=self.exit_code,
            signal=self.signal,
            by_agent=self.by_agent,
            oom_killed=self.oom_killed,
            exited_at=self.exited_at,
            error=self.error,
        )


@dataclass
class Gang:
    """All ranks of an attempt on this worker. Attempt 0: none yet."""

    attempt: int = 0
    ranks: list[Rank] = field(default_factory=list)

    @classmethod
    def started(cls, attempt: int, starts: Iterable[RankStart], pids: Iterable[int]) -> Gang:
        pairs = zip(starts, pids, strict=True)
        return cls(attempt, [Rank(s.local_rank, s.global_rank, s.error_file, pid) for s, pid in pairs])

    @classmethod
    def stillborn(cls, attempt: int, starts: Iterable[RankStart], why: str) -> Gang:
        """Return ranks that could not be started, so that the coordinator learns of it as of any crash."""
        now = time.time()
        error = RankError(message=why[:4096], time=now)
        return cls(
            attempt,
            [
                Rank(s.local_rank, s.global_rank, s.error_file, pid=0, exit_code=1, exited_at=now, error=error)
                for s in starts
            ],
        )

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.running]

    @property
    def succeeded(self) -> bool:
        return bool(self.ranks) and all(rank.exit_code == 0 for rank in self.ranks)

    def by_pid(self, pid: int) -> Rank | None:
        return next((rank for rank in self.ranks if rank.pid == pid and rank.running), None)


def read_error(file: Path) -> RankError | None:
    """Return what a rank wrote before it ended, cut to the protocol's bounds; None where it wrote nothing."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_ERROR_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        return RankError(message=f"the error file {file} cannot be read: {error}")
    try:
        record: dict[str, Any] = json.loads(data)
        for name, bound in (("message", 4096), ("exception", 256), ("traceback", 16384)):
            if isinstance(record.get(name), str):
                # The end of a traceback tells most, the beginning of a message.
                record[name] = record[name][-bound:] if name == "traceback" else record[name][:bound]
        return RankError.model_validate(record)
    except (ValueError, AttributeError, ValidationError) as error:
        return RankError(message=f"the error file {file} is no RankError: {error}"[:4096])
