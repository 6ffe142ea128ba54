"""A store that is a folder: how a checkpoint appears in it and leaves it (base.py says what is in it).

    step-00000200.attempt-3.tmp/    a checkpoint being written; becomes step-00000200 by a rename

Only in folders whose run.json names our run is anything removed, and there only files that we wrote. A foreign folder
that has the name of a checkpoint to be committed is moved aside (step-N.replaced-by-attempt-M) with all that is in it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from llmtrain_trainer.checkpoint import claims
from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint import state as states
from llmtrain_trainer.checkpoint.base import COMMITTED_NAME, MARKER, OUR_FILES, OWNER, Store, name_of
from llmtrain_trainer.checkpoint.claims import Claim
from llmtrain_trainer.checkpoint.manifest import BadCheckpoint, Manifest
from llmtrain_trainer.checkpoint.room import Room
from llmtrain_trainer.errors import CheckpointError

SCRAP = ".llmtrain-scrap-"
STAGING_NAME = re.compile(r"step-(\d+)\.attempt-\d+\.tmp")
REPLACED_NAME = re.compile(r"step-(\d+)\.replaced-by-attempt-(\d+)")
OWNER_VISIBLE_SECONDS = 10.0
"""How long a network file system may take to show rank 0's file to another node."""


class CheckpointStore(Store):
    """Rank 0's hand on the folder; other ranks only write their shards into staging_path()."""

    def __init__(self, root: Path, *, uri: str, run_id: str, attempt: int, job_uid: str = "") -> None:
        super().__init__(uri, run_id=run_id, attempt=attempt, job_uid=job_uid)
        self.root = self.metrics_folder = root

    @classmethod
    def to_read(cls, root: Path) -> CheckpointStore:
        """Open the folder of whatever run, to look for checkpoints: nothing in it is changed.

        Raises:
            BadCheckpoint: it is no such folder.
        """
        try:
            run_id = str(json.loads((root / OWNER).read_text(encoding="utf-8"))["runId"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadCheckpoint(f"{OWNER} cannot be read ({type(error).__name__})") from error
        return cls(root, uri=str(root), run_id=run_id, attempt=0)

    def claim(self) -> str:
        """Make the folder ours, or find that it is. Returns the owner file's content.

        Raises:
            UserError: the folder cannot be made or written, or belongs to another run.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            content = self._create_owner()
            self._check_owner(content)  # before anything else: in another run's folder nothing is touched
            self._remove_scraps()
            self._try_writing()
        except OSError as error:
            raise self._wrong(
                f"the folder {self.root} cannot be written: {error.strerror or error}",
                allowed="a folder that every worker can write",
                fix="correct the address or its permissions, or mount a writable volume",
            ) from error
        return content

    def expect(self, owner: str) -> None:
        """Check, on another rank, that this worker sees the very folder that rank 0 claimed and may write it.

        Raises:
            UserError: it does not.
        """
        deadline = time.monotonic() + OWNER_VISIBLE_SECONDS
        while (seen := self._read_owner_safely()) != owner:
            if seen is not None or time.monotonic() > deadline:
                raise self._wrong(
                    f"this worker does not see at {self.root} the folder that worker 0 sees",
                    allowed="one folder that all workers share and may write",
                    fix="use a volume with access mode ReadWriteMany, or the same shared path on every node",
                )
            time.sleep(0.1)
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise self._wrong(
                f"this worker may not write {self.root}",
                allowed="a folder that every worker can write",
                fix="correct its permissions",
            )

    def _create_owner(self) -> str:
        """Write the owner file unless there is one: whole at once, by a link, so that two runs cannot both win."""
        if (existing := self._read_owner()) is not None:
            return existing
        content = json.dumps({"runId": self._run_id, "id": uuid.uuid4().hex, "createdAt": time.time()})
        temporary = self._scrap()
        try:
            _write_durably(temporary, content)
            # Missing: another start of this run was quicker, and has cleared our scrap away with its own.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(temporary, self.root / OWNER)
        finally:
            temporary.unlink(missing_ok=True)
        _fsync_folder(self.root)
        return (self.root / OWNER).read_text(encoding="utf-8")

    def _read_owner(self) -> str | None:
        try:
            return (self.root / OWNER).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _read_owner_safely(self) -> str | None:
        try:
            os.listdir(self.root)  # makes a network file system forget that the file was not there
            return self._read_owner()
        except OSError:
            return None

    def _scrap(self) -> Path:
        return self.root / f"{SCRAP}{uuid.uuid4().hex}"

    def _try_writing(self) -> None:
        """Make and remove a file. A store that is full now may have room when the next checkpoint is due."""
        scrap = self._scrap()
        try:
            scrap.touch()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        scrap.unlink(missing_ok=True)  # another start of this run may have cleared it away

    def _remove_scraps(self) -> None:
        """Remove what a killed claim left behind."""
        for path in self.root.glob(f"{SCRAP}*"):
            path.unlink(missing_ok=True)

    def committed_path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies, or would."""
        return next(iter(self._forms(step)), self.root / name_of(step))

    def folder_of(self, manifest: Manifest) -> Path:
        """Return where a checkpoint that verified lies."""
        for path in self._forms(manifest.step):
            with contextlib.suppress(BadCheckpoint):
                if manifests.read(path) == manifest:
                    return path
        return self.root / name_of(manifest.step)

    def _forms(self, step: int) -> list[Path]:
        """Return the checkpoints of a step, newest claim first: a store copied from S3 may hold several."""
        there = [path for at, path in self._numbered(COMMITTED_NAME) if at == step]
        return sorted(there, key=lambda path: (self._claim_of(path), path.name), reverse=True)

    def _claim_of(self, path: Path) -> int:
        """Return under which claim a folder was written: 0 where it was before there were any."""
        match = COMMITTED_NAME.fullmatch(path.name)
        if match and match[2]:
            return int(match[2])
        try:
            return int(json.loads((path / MARKER).read_text(encoding="utf-8"))["claim"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def staging_path(self, step: int) -> Path:
        return self.root / f"{name_of(step)}.attempt-{self._number}.tmp"

    def publish(self, step: int, names: list[str]) -> None:
        """All workers see the folder anyway."""

    def discard(self, step: int) -> None:
        """Nothing is a rank's alone: abandon() removes the folder."""

    def where(self, step: int) -> str:
        return str(self.staging_path(step))

    def room_for(self, snapshot: Mapping[str, Tensor]) -> Room:
        return Room(self.root, states.whole_bytes(snapshot))

    def begin(self, step: int) -> Path:
        """Make the staging folder of this attempt, marked as ours before anything else is in it.

        Raises:
            StaleAttempt: a newer attempt has claimed the store.
            OSError: it cannot be made; nothing is left of it then.
        """
        path = self.staging_path(step)
        self.check_current()
        self._remove(path)
        path.mkdir(exist_ok=True)
        try:
            mark = {"runId": self._run_id, "step": step, "attempt": self._attempt, "claim": self._number}
            _write_durably(path / MARKER, json.dumps(mark))
        except FileExistsError:
            raise  # another's mark
        except OSError:
            with contextlib.suppress(OSError):  # a mark that was cut short would make the folder nobody's
                (path / MARKER).unlink(missing_ok=True)
                path.rmdir()
            raise
        return path

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that no rank goes on with. What cannot go now, goes at a start."""
        with contextlib.suppress(OSError):
            self._remove(self.staging_path(step))

    def commit(self, manifest: Manifest) -> None:
        """Turn the staging folder into a checkpoint: manifest, rename, each made durable before the next.

        Raises:
            StaleAttempt: a newer attempt has claimed the store.
            CheckpointError: a file that a rank reported is not there.
            OSError: the store cannot be written.
        """
        staging, target = self.staging_path(manifest.step), self.root / name_of(manifest.step)
        missing = [name for name in manifest.files if not (staging / name).is_file()]
        if missing:
            raise CheckpointError(f"{', '.join(missing[:3])} not in {staging}: do all workers share {self._uri}?")
        manifests.write(staging, manifest)
        _fsync_folder(staging)
        self.check_current()
        if target.exists():  # one of this step that did not verify when this attempt started
            aside = self.root / f"{target.name}.replaced-by-attempt-{self._number}"
            target.rename(aside)
            if self._claim_of(aside) > self._number:  # of an attempt that began since we looked
                aside.rename(target)
                self.check_current()
            staging.rename(target)
            self._remove(aside)
        else:
            staging.rename(target)  # fails where a newer attempt has put one there: a folder with files is not replaced
        _fsync_folder(self.root)
        for path in self._forms(manifest.step):
            if path != target:
                self._remove(path)

    def good(self, step: int) -> Manifest:
        """Return the manifest of a step's checkpoint, of which every byte verifies.

        Raises:
            BadCheckpoint: it does not, or there is none of this step.
        """
        problem = BadCheckpoint("there is none")
        for path in self._forms(step):
            try:
                return manifests.verify(path, run_id=self._run_id, step=step)
            except BadCheckpoint as error:
                problem = error
        raise problem

    def read(self, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        states.read(self.folder_of(manifest), tensors)

    def steps(self) -> list[int]:
        """Return the steps of which a checkpoint lies here, good or not, the oldest first."""
        return sorted({step for step, _ in self._numbered(COMMITTED_NAME)})

    def unfinished(self) -> list[str]:
        """Return the names of half-written checkpoints that earlier attempts left."""
        return sorted(path.name for _, path in self._numbered(STAGING_NAME) if self._is_ours(path))

    def clear_unfinished(self) -> None:
        """Remove what earlier attempts left half-written or half-removed."""
        self.check_current()
        for step, path in self._numbered(REPLACED_NAME):
            self._put_back(step, path)
        for pattern in (STAGING_NAME, REPLACED_NAME):
            for _, path in self._numbered(pattern):
                self._remove(path)
                with contextlib.suppress(OSError):  # killed between the folder and its mark: an empty one is nobody's
                    path.rmdir()

    def _put_back(self, step: int, aside: Path) -> None:
        """Give its name back to what an attempt moved aside, and then found to be of a newer one than itself."""
        match = REPLACED_NAME.fullmatch(aside.name)
        if match and self._claim_of(aside) > int(match[2]):
            with contextlib.suppress(OSError):  # there is another one by now
                aside.rename(self.root / name_of(step))

    def remove(self, step: int) -> None:
        for path in reversed(self._forms(step)):
            self._remove(path)

    def _claim_numbers(self) -> list[int]:
        folder = self.root / claims.FOLDER
        probe = folder / f"{SCRAP}{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):  # a change of our own makes a network file system look again
            probe.touch()
            probe.unlink()
        try:
            return claims.numbers_of(os.listdir(folder))
        except FileNotFoundError:
            return []

    def _read_claim(self, number: int) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return (self.root / claims.FOLDER / claims.name_of(number)).read_bytes()
        return b""

    def _create_claim(self, claim: Claim) -> bool:
        """Write it whole at once, by a link: a claim that was cut short would hide whose it is."""
        folder = self.root / claims.FOLDER
        folder.mkdir(exist_ok=True)
        temporary = folder / f"{SCRAP}{uuid.uuid4().hex}"
        try:
            _write_durably(temporary, claim.to_bytes().decode())
            os.link(temporary, folder / claims.name_of(claim.number))
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        _fsync_folder(folder)
        return True

    def _forget_claims(self, numbers: list[int]) -> None:
        with contextlib.suppress(OSError):
            for number in numbers:
                (self.root / claims.FOLDER / claims.name_of(number)).unlink(missing_ok=True)

    def _numbered(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
        for path in list(self.root.iterdir()):
            if (match := pattern.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
                yield int(match[1]), path

    def _is_ours(self, path: Path) -> bool:
        """Tell by the mark, or, where that is damaged, by a sound manifest: else its room would never come back."""
        try:
            return bool(json.loads((path / MARKER).read_text(encoding="utf-8"))["runId"] == self._run_id)
        except (OSError, ValueError, KeyError, TypeError):
            with contextlib.suppress(BadCheckpoint):
                return manifests.read(path).run_id == self._run_id
            return False

    def _remove(self, path: Path) -> None:
        """Remove one of our folders: the manifest first, so that it no longer counts, the marker last.

        What is not ours stays, a foreign file in our folder too (and then the folder with it).
        """
        if not self._is_ours(path):
            return
        if self._claim_of(path) > self._number:
            self.check_current()
        names = [p.name for p in path.iterdir() if OUR_FILES.fullmatch(p.name)]
        for name in sorted(names, key=lambda n: {manifests.NAME: 0, MARKER: 2}.get(n, 1)):
            (path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.rmdir()


def _write_durably(path: Path, content: str) -> None:
    with path.open("x", encoding="utf-8") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
