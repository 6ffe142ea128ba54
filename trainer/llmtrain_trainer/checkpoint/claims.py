"""Which attempt may write into a store: the one that made the newest claim (docs/adr/0003-fencing.md).

    claims/00000003    of attempt 3: who it is, as JSON; written once, and never changed

Claims are numbered in the order in which attempts start. The number is the attempt's own, except where a job was
created anew under its old name: its attempts count from 1 again, and their claims go on from the newest one.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from llmtrain_trainer.errors import StaleAttempt

FOLDER = "claims"
KEPT = 16
"""So many stay: the newest decides, the ones before it say to a person who was there."""
TRIES = 32
"""How often a number is taken by another start in the same moment, before that is called an error."""


@dataclass(frozen=True)
class Claim:
    """What one claim says."""

    number: int
    job_uid: str
    attempt: int

    def to_bytes(self) -> bytes:
        """Return the content of a new claim; no two are alike, so that who wrote one knows it again."""
        body = {"jobUid": self.job_uid, "attempt": self.attempt, "id": uuid.uuid4().hex, "createdAt": time.time()}
        return json.dumps(body).encode()


def name_of(number: int) -> str:
    """Return the name of a claim in FOLDER."""
    return f"{number:08d}"


def numbers_of(names: Iterable[str]) -> list[int]:
    """Return the numbers of the claims among the names in FOLDER, the newest first."""
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def parse(number: int, content: bytes) -> Claim:
    """Return what a claim says. One that is torn is nobody's, but it holds its number."""
    try:
        body = json.loads(content)
        return Claim(number, str(body["jobUid"]), int(body["attempt"]))
    except (ValueError, KeyError, TypeError):
        return Claim(number, "", 0)


def next_number(claims: Iterable[Claim], job_uid: str, attempt: int) -> int:
    """Return the number under which an attempt may claim the store.

    Raises:
        StaleAttempt: a later attempt of the same job has.
    """
    newest = 0
    for claim in claims:
        if claim.job_uid == job_uid and claim.attempt > attempt:
            raise StaleAttempt(f"attempt {attempt} begins, but attempt {claim.attempt} has the job's checkpoints")
        newest = max(newest, claim.number)
    return max(attempt, newest + 1)


def check(numbers: Iterable[int], own: int) -> None:
    """Make sure that no claim is newer than our own.

    Raises:
        StaleAttempt: one is.
    """
    newest = max(numbers, default=0)
    if newest > own:
        raise StaleAttempt(
            f"a newer attempt (claim {newest}) has the job's checkpoints; this one (claim {own}) writes nothing there "
            "any more: its worker was cut off, or stopped, while the job went on elsewhere"
        )
