"""When a checkpoint is made and when it counts: snapshot, shards in the background, checksums, one commit by rank 0."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint import state as states
from llmtrain_trainer.checkpoint.manifest import FileEntry, Manifest
from llmtrain_trainer.checkpoint.state import TrainingState
from llmtrain_trainer.checkpoint.store import MARKER, CheckpointStore, Resume
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.distributed import COLLECTIVE_TIMEOUT, Ranks
from llmtrain_trainer.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where training stands: what is saved beside the tensors."""

    step: int = 0
    samples: int = 0
    loss: float = 0.0


@dataclass(frozen=True)
class Committed:
    step: int
    at: float
    """Unix seconds."""


class CheckpointManager:
    """One rank's checkpoints. Every rank calls the same methods at the same steps.

    The background thread has a process group of its own: on the one that trains, its collectives would meet those of
    the next step and kill the process (gloo "collective mismatch"; KempnerForge issue 104).
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        checkpoint = config.spec.checkpoint
        self._config = config
        self._ranks = ranks
        self._store = CheckpointStore(
            config.local_path("checkpoint.store", checkpoint.store),
            uri=checkpoint.store,
            run_id=config.launch.run_id,
            attempt=config.launch.attempt,
        )
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Committed] | None = None
        self.committed: Committed | None = None
        """The newest checkpoint that counts, as far as this rank knows."""
        self.data_fingerprint = ""

    @property
    def root(self) -> Path:
        return self._store.root

    def open(self) -> Resume:
        """Claim the store and choose what to go on from: rank 0 verifies, all ranks hear its choice.

        Raises:
            UserError: the store cannot be used, is not shared, or belongs to another run.
            PeerLostError: rank 0 is gone.
        """
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        if self._config.is_first:
            owner = self._store.claim()
            unfinished = [f"{name}: half-written, never committed" for name in self._store.unfinished()]
            found = self._store.newest_good()
            self._store.clear_unfinished()
            resume = Resume(found.manifest, (*found.skipped, *unfinished))
            told = {
                "owner": owner,
                "manifest": resume.manifest and resume.manifest.to_wire(),
                "skipped": resume.skipped,
            }
            self._ranks.tell("resume", json.dumps(told))
        else:
            told = json.loads(self._ranks.hear("resume"))
            self._store.expect(told["owner"])
            manifest = Manifest.model_validate(told["manifest"]) if told["manifest"] else None
            resume = Resume(manifest, tuple(told["skipped"]))
        if resume.manifest:
            self.committed = Committed(resume.manifest.step, resume.manifest.created_at)
        return resume

    def restore(self, manifest: Manifest, state: TrainingState) -> Position:
        """Load a verified checkpoint into the live state.

        Raises:
            UserError: it was made by another optimizer.
            CheckpointError: it cannot be loaded.
        """
        states.check_optimizer(manifest, state.optimizer.name)
        launch = self._config.launch
        if manifest.spec_fingerprint != spec_fingerprint(self._config):
            log.warning("the spec has changed since the checkpoint of step %d was made", manifest.step)
        if manifest.data_fingerprint != self.data_fingerprint:
            log.warning("the data has changed since the checkpoint of step %d: its order starts anew", manifest.step)
        folder = self._store.committed_path(manifest.step)
        shape = self._config.shape
        then = manifest.world_size, manifest.tensor, manifest.context, manifest.pipeline, manifest.expert
        now = shape.world_size, shape.tp, shape.cp, shape.pp, shape.ep
        states.restore(folder, manifest, state, rank=launch.global_rank, same_layout=then == now)
        return Position(manifest.step, manifest.samples, manifest.loss)

    def save(self, position: Position, state: TrainingState) -> None:
        """Copy the state, and write it in the background. Waits first for a save that is still being written.

        Raises:
            CheckpointError: the save before this one failed.
        """
        self.wait()
        snapshot = states.snapshot(state, self._config.launch.global_rank)
        self._pending = self._thread.submit(self._write, position, snapshot)

    def poll(self) -> None:
        """Take note of a save that has finished since the last call.

        Raises:
            CheckpointError: it failed.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            CheckpointError: the save failed.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.committed = pending.result()

    def _write(self, position: Position, snapshot: dict[str, Any]) -> Committed:
        """Write and commit one checkpoint; runs in the background thread of every rank at once."""
        path = self._store.staging_path(position.step)
        try:
            self._begin(position.step)
            writer = FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=1)
            save(snapshot, storage_writer=writer, process_group=self._group)
            return self._commit(position, self._own_files(path))
        except (CheckpointException, OSError) as error:  # the first is no subclass of Exception
            problem = states.first_problem(error) if isinstance(error, CheckpointException) else str(error)
            message = f"step {position.step} could not be saved to {path}: {self._why(problem, snapshot)}"
            if self._config.is_first:
                self._store.abandon(position.step)
            raise CheckpointError(message) from error

    def _begin(self, step: int) -> None:
        """Have rank 0 make and mark the folder before anybody writes: one without its mark would never be cleared.

        Raises:
            OSError: on every rank, where rank 0 cannot make it.
        """
        problem: list[str] = [""]
        if self._config.is_first:
            try:
                self._store.begin(step)
            except OSError as error:
                problem = [str(error)]
        dist.broadcast_object_list(problem, src=0, group=self._group)
        if problem[0]:
            raise OSError(problem[0])

    def _why(self, problem: str, snapshot: dict[str, Any]) -> str:
        """Return the cause in words: torch's own of a full disk is a position in a file."""
        try:
            free = shutil.disk_usage(self.root).free
        except OSError:
            return problem
        needed = sum(tensor.numel() * tensor.element_size() for tensor in snapshot.values())
        if free >= needed:
            return f"{problem} ({free >> 20} MiB free)"
        uri = self._config.spec.checkpoint.store
        return (
            f"spec.checkpoint.store {uri} is full: {free >> 20} MiB free, {needed / 2**20:.1f} MiB needed by this rank "
            f"alone; fix: make room there, lower spec.checkpoint.keep, or use a larger volume ({problem})"
        )

    def _own_files(self, path: Path) -> dict[str, FileEntry] | str:
        """Return size and checksum of each file that this rank wrote, or what went wrong."""
        rank = self._config.launch.global_rank
        try:
            shared = [path / ".metadata", path / MARKER] if rank == 0 else []
            return {p.name: manifests.entry_of(p) for p in (*path.glob(f"__{rank}_*.distcp"), *shared)}
        except OSError as error:
            return f"rank {rank}: {error}"

    def _commit(self, position: Position, own: dict[str, FileEntry] | str) -> Committed:
        """Gather the checksums at rank 0, who commits; every rank learns how that went."""
        gathered: list[Any] = [None] * self._ranks.world_size
        dist.gather_object(own, gathered if self._config.is_first else None, dst=0, group=self._group)
        outcome: list[Any] = [None]
        if self._config.is_first:
            outcome = [self._commit_first(position, gathered)]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], str):
            raise CheckpointError(outcome[0])
        return Committed(position.step, outcome[0])

    def _commit_first(self, position: Position, gathered: list[dict[str, FileEntry] | str]) -> float | str:
        """Return the time of the commit, or what went wrong: an exception here would leave the others waiting."""
        files: dict[str, FileEntry] = {}
        for part in gathered:
            if isinstance(part, str):
                return part
            files |= part
        try:
            manifest = self._manifest(position, files)
            self._store.commit(manifest)
        except (OSError, CheckpointError) as error:
            return str(error)
        try:
            self._store.retire(self._config.spec.checkpoint.keep, newest=position.step)
        except OSError as error:
            log.warning("an old checkpoint could not be removed: %s", error)
        return manifest.created_at

    def _manifest(self, position: Position, files: dict[str, FileEntry]) -> Manifest:
        launch = self._config.launch
        return Manifest(
            run_id=launch.run_id,
            job_uid=launch.job_uid,
            attempt=launch.attempt,
            step=position.step,
            samples=position.samples,
            loss=position.loss,
            world_size=launch.world_size,
            replicate=self._config.shape.dp_replicate,
            tensor=self._config.shape.tp,
            context=self._config.shape.cp,
            pipeline=self._config.shape.pp,
            expert=self._config.shape.ep,
            optimizer=self._config.spec.training.optimizer.name,
            model=self._config.dimensions,
            spec_fingerprint=spec_fingerprint(self._config),
            data_fingerprint=self.data_fingerprint,
            created_at=time.time(),
            files=files,
        )


def spec_fingerprint(config: RunConfig) -> str:
    """Return a hash of what decides the numbers: training, data and the model, not where they run."""
    spec = config.spec
    parts = [spec.training.to_wire(), spec.data.to_wire(), config.dimensions.to_wire()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
