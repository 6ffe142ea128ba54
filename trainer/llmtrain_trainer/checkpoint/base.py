"""What every store is asked for: one that all workers share, as a folder (store.py) or behind an address (objects.py).

Both hold the same files under the same names, so that one may be copied to the other:

    owner.json             the run that this store belongs to
    metrics.jsonl          one line per step (written by metrics/)
    claims/                the attempts that have written here (claims.py)
    step-00000100/         a checkpoint: run.json, shards, .metadata; committed once manifest.json is in it
    step-00000100.attempt-3/    the same, as it is named where nothing can be renamed; 3 is the claim's number
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from llmtrain_trainer.checkpoint import claims
from llmtrain_trainer.checkpoint.claims import Claim
from llmtrain_trainer.checkpoint.manifest import BadCheckpoint, Manifest
from llmtrain_trainer.checkpoint.room import Room
from llmtrain_trainer.errors import UserError

OWNER = "owner.json"
MARKER = "run.json"
METRICS = "metrics.jsonl"
FIELD = "checkpoint.store"
COMMITTED_NAME = re.compile(r"step-(\d+)(?:\.attempt-(\d+))?")
OUR_FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json|run\.json")


@dataclass(frozen=True)
class Resume:
    """What a restart goes on from."""

    manifest: Manifest | None
    """None: from the beginning."""
    skipped: tuple[str, ...]
    """Newer checkpoints that do not verify, each with the reason."""


class Store(ABC):
    """Rank 0's hand on the store; other ranks only check it, and add their shards."""

    metrics_folder: Path
    """Where rank 0 appends to METRICS."""

    def __init__(self, uri: str, *, run_id: str, attempt: int, job_uid: str = "") -> None:
        self._uri = uri
        self._run_id = run_id
        self._attempt = attempt
        self._job_uid = job_uid
        self._number = attempt
        """Of our claim; the names of what we write carry it."""
        self._bad: set[int] = set()

    @abstractmethod
    def claim(self) -> str:
        """Make the store ours, or find that it is. Returns the owner file's content.

        Raises:
            UserError: the store cannot be used, or belongs to another run.
            CheckpointError: it cannot be reached now.
        """

    @abstractmethod
    def expect(self, owner: str) -> None:
        """Check, on another rank, that this worker sees the very store that rank 0 claimed.

        Raises:
            UserError: it does not.
            CheckpointError: it cannot be reached now.
        """

    def enter(self) -> int:
        """Claim the store for this attempt, on rank 0, before anything is read: no older one commits from now on.

        Returns the claim's number.

        Raises:
            StaleAttempt: a newer attempt has it.
            OSError: the claim cannot be written or the others not read.
        """
        for _ in range(claims.TRIES):
            known = (claims.parse(n, self._read_claim(n)) for n in self._claim_numbers()[: claims.KEPT])
            claim = Claim(claims.next_number(known, self._job_uid, self._attempt), self._job_uid, self._attempt)
            if self._create_claim(claim):
                self.follow(claim.number)
                self.check_current()
                self._forget_claims([n for n in self._claim_numbers() if n <= claim.number][claims.KEPT :])
                return claim.number
        raise OSError(f"{self._uri}/{claims.FOLDER}: other starts of this job take every number")

    @property
    def number(self) -> int:
        """Of the claim under which this attempt writes."""
        return self._number

    def follow(self, number: int) -> None:
        """Write under the claim that rank 0 has made, on every rank."""
        self._number = number

    def check_current(self) -> None:
        """Make sure that this attempt may still write.

        Raises:
            StaleAttempt: a newer one has claimed the store.
            OSError: the claims cannot be read, so that nobody knows.
        """
        claims.check(self._claim_numbers(), self._number)

    @abstractmethod
    def _claim_numbers(self) -> list[int]:
        """Return the numbers of all claims, the newest first. May raise OSError."""

    @abstractmethod
    def _read_claim(self, number: int) -> bytes:
        """Return a claim's content, empty where it is gone. May raise OSError."""

    @abstractmethod
    def _create_claim(self, claim: Claim) -> bool:
        """Write a claim unless its number is taken; tell whether we did. May raise OSError."""

    @abstractmethod
    def _forget_claims(self, numbers: list[int]) -> None:
        """Remove claims that decide nothing any more, as far as they can be."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps of which a checkpoint lies here, good or not, the oldest first. May raise OSError."""

    @abstractmethod
    def good(self, step: int) -> Manifest:
        """Return the manifest of a step's checkpoint, of which every byte verifies.

        Raises:
            BadCheckpoint: it does not, or there is none of this step.
        """

    @abstractmethod
    def read(self, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        """Fill tensors by name, in place, from a checkpoint that verifies.

        Raises:
            CheckpointError: it cannot be read.
        """

    @abstractmethod
    def staging_path(self, step: int) -> Path:
        """Return the folder into which this rank writes its shards."""

    @abstractmethod
    def where(self, step: int) -> str:
        """Return in words where a checkpoint is being written."""

    @abstractmethod
    def room_for(self, snapshot: Mapping[str, Tensor]) -> Room | None:
        """Return the room for the checkpoint of a snapshot, which older ones would make; None where nobody knows it."""

    @abstractmethod
    def begin(self, step: int) -> Path:
        """Make room for a checkpoint, marked as ours before anything else is in it. May raise OSError."""

    @abstractmethod
    def publish(self, step: int, names: list[str]) -> None:
        """Bring files that this rank wrote below staging_path() where all can read them. May raise OSError."""

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Make what was published a checkpoint: from now on it counts.

        Raises:
            StaleAttempt: a newer attempt has claimed the store.
            CheckpointError: a file that a rank reported is not there.
            OSError: the store cannot be written.
        """

    @abstractmethod
    def discard(self, step: int) -> None:
        """Remove what this rank alone holds of a checkpoint that no rank goes on with."""

    @abstractmethod
    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that no rank goes on with. What cannot go now, goes at a start."""

    @abstractmethod
    def remove(self, step: int) -> None:
        """Remove a checkpoint of ours, its manifest first. May raise OSError."""

    @abstractmethod
    def unfinished(self) -> list[str]:
        """Return the names of half-written checkpoints that earlier attempts left."""

    @abstractmethod
    def clear_unfinished(self) -> None:
        """Remove what earlier attempts left half-written or half-removed."""

    def newest_good(self, above: int = -1) -> Resume:
        """Return the newest checkpoint above a step of which every byte verifies, and why newer ones do not."""
        skipped: list[str] = []
        for step in reversed([step for step in self.steps() if step > above]):
            try:
                return Resume(self.good(step), tuple(skipped))
            except BadCheckpoint as error:
                self._bad.add(step)
                skipped.append(f"{name_of(step)}: {error}")
        if skipped and above < 0:
            skipped.insert(0, "no checkpoint verifies, so training begins anew")
        return Resume(None, tuple(skipped))

    def retire(self, keep: int, *, newest: int, permanent: int | None = None) -> None:
        """Remove our checkpoints but the newest `keep` up to `newest`, which is good: it stays.

        Those at multiples of `permanent` stay too. One that did not verify when this attempt started counts for
        nothing and goes, unless it is permanent: what is left of it may be all there is of its step.

        Raises:
            StaleAttempt: a newer attempt has claimed the store; what it goes on from is its own affair.
            OSError: one cannot be removed.
        """
        self._bad.discard(newest)
        older = [step for step in self.steps() if step < newest]
        good = [step for step in older if step not in self._bad]
        bad = [step for step in older if step in self._bad]
        for step in (*bad, *good[: max(0, len(good) - keep + 1)]):
            if permanent is None or step % permanent:
                self.check_current()
                self.remove(step)

    def _check_owner(self, content: str) -> None:
        try:
            owner = json.loads(content)["runId"]
        except (ValueError, KeyError, TypeError):
            owner = f"(unreadable {OWNER})"
        if owner != self._run_id:
            raise self._wrong(
                f"the store belongs to the run {owner!r}, this is {self._run_id!r}",
                allowed="a store of its own for each job",
                fix=f"choose another address, or, if that run is no longer needed, remove its {OWNER}",
            )

    def _wrong(self, problem: str, *, allowed: str, fix: str) -> UserError:
        return UserError(FIELD, self._uri, problem, allowed=allowed, fix=fix)


def name_of(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"
