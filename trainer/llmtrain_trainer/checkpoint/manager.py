"""When a checkpoint is made and when it counts: snapshot, shards in the background, checksums, one commit by rank 0."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
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
from llmtrain_trainer.checkpoint.pace import Meter, Pace, failure_seconds, young_interval
from llmtrain_trainer.checkpoint.room import Room
from llmtrain_trainer.checkpoint.state import TrainingState
from llmtrain_trainer.checkpoint.store import MARKER, CheckpointStore, Resume
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.distributed import COLLECTIVE_TIMEOUT, Ranks
from llmtrain_trainer.errors import CheckpointError

log = logging.getLogger(__name__)

LAST_PAUSES = (1.0, 3.0, 9.0)
"""Seconds before the last checkpoint is tried again: with the tries, well within deadlines.stopSeconds' default."""


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


@dataclass(frozen=True)
class Failed:
    """A checkpoint that was not made, the same on every rank."""

    step: int
    reason: str


class CheckpointManager:
    """One rank's checkpoints. Every rank calls the same methods at the same steps.

    A checkpoint counts on all ranks or on none: whatever stops one of them is told to all, in the collectives of the
    save itself. One that fails costs nothing but itself, since training goes on and the next one is tried; only at the
    end is it an error. A rank that is gone is another matter: that ends the attempt, as everywhere.

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
        self._meter = Meter()
        by_time = checkpoint.every_seconds is not None or checkpoint.pace == "auto"
        self._pace = Pace(self._meter, self._interval_seconds) if by_time else None
        self._owned_at = time.time()
        self._pending: Future[Committed | Failed] | None = None
        self.committed: Committed | None = None
        """The newest checkpoint that counts, as far as this rank knows."""
        self.on_failure: Callable[[Failed], None] = lambda _: None
        """Called in the training thread with each checkpoint that was not made."""
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
            self._owned_at = float(json.loads(owner).get("createdAt", self._owned_at))
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

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is to be made after this step: alike on every rank, each of which asks each step.

        Raises:
            RuntimeError: another rank is gone.
        """
        checkpoint = self._config.spec.checkpoint
        regular = self._pace.due(step) if self._pace else step % checkpoint.every_steps == 0
        return regular or (checkpoint.keep_every_steps is not None and step % checkpoint.keep_every_steps == 0)

    def _interval_seconds(self) -> float:
        """Return the seconds that should lie between checkpoints, on rank 0."""
        checkpoint, launch = self._config.spec.checkpoint, self._config.launch
        if checkpoint.every_seconds is not None:
            return float(checkpoint.every_seconds)
        cost = self._meter.cost_seconds
        if cost is None:
            return math.inf if self._pending else 0.0  # the first one tells what one costs
        lived = time.time() - self._owned_at
        return young_interval(cost, failure_seconds(launch.world_size, launch.attempt - 1, lived))

    def save(self, position: Position, state: TrainingState) -> None:
        """Copy the state, and write it in the background. Waits first for a save that is still being written."""
        with self._meter.saving():
            self.wait()
            self._start(position, states.snapshot(state, self._config.launch.global_rank))

    def save_last(self, position: Position, state: TrainingState) -> None:
        """Return when the checkpoint of `position` counts: nobody comes after it who could save the work.

        Raises:
            CheckpointError: it could not be made, at several tries.
        """
        self.wait()
        if self._counts(position):
            return
        snapshot = states.snapshot(state, self._config.launch.global_rank)
        for pause in (0.0, *LAST_PAUSES):
            time.sleep(pause)
            self._start(position, snapshot)
            failed = self.wait()
            if self._counts(position):
                return
        raise CheckpointError(f"{failed.reason if failed else 'not committed'}; tried {1 + len(LAST_PAUSES)} times")

    def poll(self) -> None:
        """Take note of the end of a step, and of a save that has finished since the last call."""
        self._meter.tick(saving=self._pending is not None)
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> Failed | None:
        """Return when nothing is being written any more: the failure, where what was on its way was not made."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        outcome = pending.result()
        self._meter.saved(good=isinstance(outcome, Committed))
        if isinstance(outcome, Failed):
            self.on_failure(outcome)
            return outcome
        self.committed = outcome
        return None

    def _counts(self, position: Position) -> bool:
        return self.committed is not None and self.committed.step == position.step

    def _start(self, position: Position, snapshot: dict[str, Any]) -> None:
        self._pending = self._thread.submit(self._write, position, snapshot)

    def _write(self, position: Position, snapshot: dict[str, Any]) -> Committed | Failed:
        """Write and commit one checkpoint; runs in the background thread of every rank at once.

        What is caught here was raised on every rank: by torch, which gathers what went wrong, or from rank 0's word.
        """
        path, room = self._store.staging_path(position.step), Room(self.root, states.whole_bytes(snapshot))
        try:
            self._begin(position.step, room)
            writer = FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=1)
            save(snapshot, storage_writer=writer, process_group=self._group)
            return self._commit(position, self._own_files(path))
        except (CheckpointException, CheckpointError) as error:  # the first is no subclass of Exception
            problem = states.first_problem(error) if isinstance(error, CheckpointException) else str(error)
        reason = ""
        if self._config.is_first:
            why = room.explain(problem, self._config.spec.checkpoint.store)  # before the room is given back
            reason = f"step {position.step} could not be saved to {path}: {why}"
            self._store.abandon(position.step)
        return Failed(position.step, self._from_first(reason))

    def _from_first(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _begin(self, step: int, room: Room) -> None:
        """Have rank 0 make and mark the folder before anybody writes: one without its mark would never be cleared.

        Raises:
            CheckpointError: on every rank, where rank 0 cannot make it or sees that there is no room.
        """
        problem = ""
        if self._config.is_first:
            try:
                self._make_room(room)
                self._store.begin(step)
            except (CheckpointError, OSError) as error:
                problem = str(error)
        if problem := self._from_first(problem):
            raise CheckpointError(problem)

    def _make_room(self, room: Room) -> None:
        """Where room is short, retire what the commit would retire anyway. The newest one that is good stays.

        Raises:
            CheckpointError: it is short still.
        """
        if room.is_short() and self.committed is not None:
            self._retire(max(1, self._config.spec.checkpoint.keep - 1), newest=self.committed.step)
        if room.is_short():
            raise CheckpointError("not begun")

    def _own_files(self, path: Path) -> dict[str, FileEntry] | str:
        """Return size and checksum of each file that this rank wrote, or what went wrong."""
        rank = self._config.launch.global_rank
        try:
            shared = [path / ".metadata", path / MARKER] if rank == 0 else []
            return {p.name: manifests.entry_of(p) for p in (*path.glob(f"__{rank}_*.distcp"), *shared)}
        except OSError as error:
            return f"rank {rank}: {error}"

    def _commit(self, position: Position, own: dict[str, FileEntry] | str) -> Committed:
        """Gather the checksums at rank 0, who commits; every rank learns how that went.

        Raises:
            CheckpointError: on every rank, where it does not count.
        """
        gathered: list[Any] = [None] * self._ranks.world_size
        dist.gather_object(own, gathered if self._config.is_first else None, dst=0, group=self._group)
        outcome = self._from_first(self._commit_first(position, gathered) if self._config.is_first else None)
        if isinstance(outcome, str):
            raise CheckpointError(outcome)
        return Committed(position.step, outcome)

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
            self._retire(self._config.spec.checkpoint.keep, newest=position.step)
        except OSError as error:
            log.warning("an old checkpoint could not be removed: %s", error)
        return manifest.created_at

    def _retire(self, keep: int, newest: int) -> None:
        self._store.retire(keep, newest=newest, permanent=self._config.spec.checkpoint.keep_every_steps)

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
