"""A tier that each worker has for itself: the memory (/dev/shm) or a disk of its node.

    <root>/llmtrain-<id of the store>/worker-0-memory/step-00000010/    rank-0.safetensors, ..., manifest.json
    <root>/llmtrain-<id of the store>/worker-0-memory/step-00000020.attempt-3.tmp/    being written

Each rank's whole state is a file of its own, which no other rank reads: a checkpoint here serves the same layout on the
same workers only, and a step counts where every rank finds its file. For all else there is the store. The id is that
of the store's owner.json: a store that was emptied, so that training begins anew, has another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint.header import layout_fingerprint, manifest_of
from llmtrain_trainer.checkpoint.headroom import headroom_bytes
from llmtrain_trainer.checkpoint.manifest import BadCheckpoint, FileEntry, Manifest
from llmtrain_trainer.checkpoint.outcome import Committed, Failed, Position
from llmtrain_trainer.checkpoint.writer import from_all, from_first
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import CheckpointError

COMMITTED_NAME = re.compile(r"step-(\d+)")


class LocalTier:
    """One rank's hand on the folder of its worker; the first rank of the worker makes and removes checkpoints."""

    def __init__(self, config: RunConfig, name: str, root: Path, *, every_steps: int, keep: int) -> None:
        self.name = name
        """`memory` or `disk`: the field below spec.checkpoint."""
        self.every_steps = every_steps
        self.data_fingerprint = ""
        self._config = config
        self._root = root
        self._folder = root
        self._keep = keep
        self._leads = config.launch.local_rank == 0
        self._file = f"rank-{config.launch.global_rank}.safetensors"

    def open(self, store_id: str) -> dict[int, Manifest]:
        """Return what this rank can go on from, by step: its own file is there and every byte of it verifies."""
        self._folder = self._root / f"llmtrain-{store_id}" / f"worker-{self._config.launch.node_rank}-{self.name}"
        good: dict[int, Manifest] = {}
        for step, path in self._committed():
            with contextlib.suppress(BadCheckpoint):
                good[step] = self._verified(path, step)
        return good

    def settle(self, step: int, kept: Iterable[int]) -> None:
        """Remove what training does not go on from: half-written ones, and all but `kept` up to `step`.

        Steps after it are of a course that was given up. Called when every rank has looked at what there is.
        """
        if not self._leads:
            return
        stays = {self._path(found) for found in kept if found <= step}
        with contextlib.suppress(OSError):
            for path in set(self._folder.iterdir()) - stays:
                _remove(path)

    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, in place, from a step that `open` has found good.

        Raises:
            CheckpointError: it cannot be read although it verified.
        """
        path = self._path(step) / self._file
        try:
            saved = load_file(path)
            for name, tensor in tensors.items():
                if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
                    raise CheckpointError(f"{path}: {name} has another shape or type than this rank's")
                tensor.copy_(saved[name])
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path} verifies but cannot be loaded: {error}") from error

    def write(self, position: Position, snapshot: Mapping[str, Tensor], group: Any) -> Committed | Failed:
        """Write and commit one checkpoint; runs in the background thread of every rank at once."""
        staging = self._folder / f"step-{position.step:08d}.attempt-{self._config.launch.attempt}.tmp"
        own = self._write_own(staging, snapshot)
        every = from_all((self._config.launch.node_rank, own), group)
        problems = [f"rank {rank}: {part}" for rank, (_, part) in enumerate(every) if isinstance(part, str)]
        if not problems:
            same = self._config.is_first and manifest_of(self._config, position, self.data_fingerprint, {})
            manifest: Manifest = from_first(same, group)
            mine = [part for node, part in every if node == self._config.launch.node_rank]
            files = {name: entry for part in mine for name, entry in part.items()}
            problem = self._commit(staging, manifest.model_copy(update={"files": files}))
            # Nothing older goes before every worker has the new one: else a kill here could leave no step to all.
            problems = [f"rank {rank}: {text}" for rank, text in enumerate(from_all(problem, group)) if text]
        if problems:
            if self._leads:  # it may be committed here, but not on every worker: it would only take room
                _remove(staging)
                _remove(self._path(position.step))
            where = f"spec.checkpoint.{self.name} ({self._root})"
            fix = f"fix: see that ranks can write there, make room, or lower spec.checkpoint.{self.name}.keep"
            return Failed(position.step, f"step {position.step} could not be saved to {where}: {problems[0]}; {fix}")
        self._retire()
        return Committed(position.step, manifest.created_at)

    def clear(self) -> None:
        """Give the room back: the job has ended, and what counts is in the store."""
        if self._leads:
            _remove(self._folder)
            with contextlib.suppress(OSError):  # another worker on this machine still uses it
                self._folder.parent.rmdir()

    def _write_own(self, staging: Path, snapshot: Mapping[str, Tensor]) -> dict[str, FileEntry] | str:
        """Write this rank's file. Returns its size and checksum, or what went wrong."""
        path = staging / self._file
        if problem := self._too_much_memory(snapshot):
            return problem
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            staging.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in snapshot.items()}, path)
            _sync(path)
            return {self._file: manifests.entry_of(path)}
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"{error}{_free(self._root)}"

    def _too_much_memory(self, snapshot: Mapping[str, Tensor]) -> str:
        """Say why the container would be killed if all ranks of this worker wrote as much as this one."""
        free = headroom_bytes() if self.name == "memory" else None
        needed = self._config.launch.local_world_size * sum(tensor.nbytes for tensor in snapshot.values())
        if free is None or free >= needed:
            return ""
        return (
            f"the container's memory limit leaves {max(free, 0) / 2**20:.1f} MiB, and the ranks of this worker need "
            f"{needed / 2**20:.1f} MiB; a higher resources.limits.memory would hold them"
        )

    def _commit(self, staging: Path, manifest: Manifest) -> str:
        """Make the worker's files a checkpoint. Returns what went wrong."""
        if not self._leads:
            return ""
        try:
            manifests.write(staging, manifest)
            _sync(staging)
            staging.rename(self._path(manifest.step))
            _sync(self._folder)
            return ""
        except OSError as error:
            return f"{error}{_free(self._root)}"

    def _retire(self) -> None:
        if self._leads:
            for _, path in self._committed()[self._keep :]:
                _remove(path)

    def _verified(self, path: Path, step: int) -> Manifest:
        manifest = manifests.read(path)
        launch = self._config.launch
        if manifest.run_id != launch.run_id or manifest.step != step or self._file not in manifest.files:
            raise BadCheckpoint("it is of another run, step or worker")
        if manifest.layout_fingerprint != layout_fingerprint(self._config):
            raise BadCheckpoint("it is of another layout")
        if problem := manifests.problem(path / self._file, manifest.files[self._file]):
            raise BadCheckpoint(problem)
        return manifest

    def _committed(self) -> list[tuple[int, Path]]:
        """Return the checkpoints here, the newest first."""
        try:
            named = [(COMMITTED_NAME.fullmatch(path.name), path) for path in self._folder.iterdir()]
        except OSError:
            return []
        return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"


def _remove(path: Path) -> None:
    """Remove a folder, its manifest first: what is half-removed does not count."""
    with contextlib.suppress(OSError):
        (path / manifests.NAME).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Make a file or a folder durable; in memory this costs nothing."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free(root: Path) -> str:
    try:
        return f" ({shutil.disk_usage(root).free / 2**20:.1f} MiB free)"
    except OSError:
        return ""
