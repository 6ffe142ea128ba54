"""How all ranks together write a checkpoint into the store that they share: shards, checksums, one commit by rank 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint import state as states
from llmtrain_trainer.checkpoint.base import MARKER, Store
from llmtrain_trainer.checkpoint.header import manifest_of
from llmtrain_trainer.checkpoint.manifest import FileEntry
from llmtrain_trainer.checkpoint.outcome import Committed, Failed, Position
from llmtrain_trainer.checkpoint.room import Room
from llmtrain_trainer.checkpoint.writer import from_first
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import CheckpointError, StaleAttempt

log = logging.getLogger(__name__)


class SharedTier:
    """One rank's part in it.

    A checkpoint counts on all ranks or on none: whatever stops one of them is told to all, in the collectives of the
    save itself.
    """

    def __init__(self, config: RunConfig, store: Store) -> None:
        self.data_fingerprint = ""
        self.newest_good: int | None = None
        """The newest step that is known to be good: the one that never goes."""
        self._config = config
        self._store = store

    def write(self, position: Position, snapshot: Mapping[str, Tensor], group: Any) -> Committed | Failed:
        """Write and commit one checkpoint; runs in the background thread of every rank at once.

        A StaleAttempt ends the attempt, on every rank; what is ours alone stays until the next start.

        What is caught here was raised on every rank: by torch, which gathers what went wrong, or from rank 0's word.
        """
        path = self._store.staging_path(position.step)
        room = self._store.room_for(snapshot)
        try:
            self._begin(position.step, room, group)
            writer = FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=1)
            save(dict(snapshot), storage_writer=writer, process_group=group)
            committed = self._commit(position, self._own_files(position.step), group)
        except (CheckpointException, CheckpointError) as error:  # the first is no subclass of Exception
            problem = states.first_problem(error) if isinstance(error, CheckpointException) else str(error)
        else:
            self.newest_good = committed.step
            return committed
        reason = ""
        if self._config.is_first:
            # Before the room is given back.
            why = room.explain(problem, self._config.spec.checkpoint.store) if room else problem
            reason = f"step {position.step} could not be saved to {self._store.where(position.step)}: {why}"
            self._store.abandon(position.step)
        self._store.discard(position.step)
        return Failed(position.step, from_first(reason, group))

    def _begin(self, step: int, room: Room | None, group: Any) -> None:
        """Have rank 0 make and mark the folder before anybody writes: one without its mark would never be cleared.

        Raises:
            CheckpointError: on every rank, where rank 0 cannot make it or sees that there is no room.
            StaleAttempt: on every rank, where rank 0 sees that a newer attempt has claimed the store.
        """
        problem: Exception | None = None
        if self._config.is_first:
            try:
                if room:
                    self._make_room(room)
                self._store.begin(step)
            except (CheckpointError, OSError) as error:
                problem = CheckpointError(str(error))
            except StaleAttempt as error:
                problem = error
        if problem := from_first(problem, group):
            raise problem

    def _make_room(self, room: Room) -> None:
        """Where room is short, retire what the commit would retire anyway. The newest one that is good stays.

        Raises:
            CheckpointError: it is short still.
        """
        if room.is_short():
            if self.newest_good is None:  # the run goes on from a nearer tier: what lies here was not read at its start
                found = self._store.newest_good().manifest
                self.newest_good = found.step if found else None
            if self.newest_good is not None:
                self._retire(max(1, self._config.spec.checkpoint.keep - 1), newest=self.newest_good)
        if room.is_short():
            raise CheckpointError("not begun")

    def _own_files(self, step: int) -> dict[str, FileEntry] | str:
        """Publish each file that this rank wrote. Returns size and checksum of each, or what went wrong."""
        rank, path = self._config.launch.global_rank, self._store.staging_path(step)
        try:
            shared = [path / ".metadata", path / MARKER] if rank == 0 else []
            files = {p.name: manifests.entry_of(p) for p in (*path.glob(f"__{rank}_*.distcp"), *shared)}
            self._store.publish(step, list(files))
            return files
        except OSError as error:
            return f"rank {rank}: {error}"

    def _commit(self, position: Position, own: dict[str, FileEntry] | str, group: Any) -> Committed:
        """Gather the checksums at rank 0, who commits; every rank learns how that went.

        Raises:
            CheckpointError: on every rank, where it does not count.
            StaleAttempt: on every rank, where a newer attempt has claimed the store.
        """
        gathered: list[Any] = [None] * self._config.launch.world_size
        dist.gather_object(own, gathered if self._config.is_first else None, dst=0, group=group)
        outcome = from_first(self._commit_first(position, gathered) if self._config.is_first else None, group)
        if isinstance(outcome, str):
            raise CheckpointError(outcome)
        if isinstance(outcome, StaleAttempt):
            raise outcome
        return Committed(position.step, outcome)

    def _commit_first(
        self, position: Position, gathered: list[dict[str, FileEntry] | str]
    ) -> float | str | StaleAttempt:
        """Return the time of the commit, or what went wrong: an exception here would leave the others waiting."""
        files: dict[str, FileEntry] = {}
        for part in gathered:
            if isinstance(part, str):
                return part
            files |= part
        try:
            manifest = manifest_of(self._config, position, self.data_fingerprint, files)
            self._store.commit(manifest.model_copy(update={"claim": self._store.number}))
        except (OSError, CheckpointError) as error:
            return str(error)
        except StaleAttempt as error:
            return error
        try:
            self._retire(self._config.spec.checkpoint.keep, newest=position.step)
        except OSError as error:
            log.warning("an old checkpoint could not be removed: %s", error)
        except StaleAttempt as error:
            return error
        return manifest.created_at

    def _retire(self, keep: int, newest: int) -> None:
        self._store.retire(keep, newest=newest, permanent=self._config.spec.checkpoint.keep_every_steps)
