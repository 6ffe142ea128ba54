"""The manifest that commits a checkpoint: what it is a checkpoint of, and a checksum for every file in it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from llmtrain_api.meta import ApiModel
from llmtrain_api.presets import ModelDimensions

NAME = "manifest.json"
CHUNK_BYTES = 1 << 22
VERIFY_THREADS = 8
READ_PAUSES = (0.5, 1.0, 2.0)
"""Seconds before a file that could not be read is tried again."""


class FileEntry(ApiModel):
    bytes: int
    sha256: str


class Manifest(ApiModel):
    """Everything that must be known before a shard is opened."""

    format: int = 1
    id: str = ""
    """Of this very checkpoint: workers that hold parts of it know by it that they belong together."""
    run_id: str
    job_uid: str
    attempt: int
    claim: int = 0
    """Under which it was written (claims.py); 0: before there were any."""
    step: int
    """Optimizer steps done."""
    samples: int
    """Sequences consumed: the position in the data."""
    loss: float
    """Of that step."""
    world_size: int
    replicate: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    optimizer: str = "adamw"
    model: ModelDimensions
    spec_fingerprint: str
    layout_fingerprint: str = ""
    data_fingerprint: str
    versions: dict[str, str] = Field(default_factory=dict)
    """Of llmtrain and torch, that made it."""
    created_at: float
    """Unix seconds."""
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """Return the file's content: the fields, and a checksum over them, so that a flipped byte here is found too."""
        body = self.to_wire()
        return _text(body, _checksum(body))


class BadCheckpoint(Exception):
    """A checkpoint folder does not verify; the text says why."""


def read(folder: Path) -> Manifest:
    """Read and check the manifest alone.

    Raises:
        BadCheckpoint: it is missing, torn or damaged.
    """
    try:
        return parse((folder / NAME).read_bytes())
    except FileNotFoundError:
        raise BadCheckpoint("no manifest: it was never committed") from None
    except OSError as error:
        raise BadCheckpoint(f"the manifest cannot be read: {error}") from error


def parse(content: bytes) -> Manifest:
    """Return the manifest that a file holds.

    Raises:
        BadCheckpoint: it is torn or damaged.
    """
    try:
        body: dict[str, Any] = json.loads(content)
        claimed = body.pop("sha256")
        if claimed != _checksum(body):
            raise BadCheckpoint("the manifest is damaged (checksum)")
        if content != _text(body, claimed):  # a space more, 1E-5 for 1e-5: the meaning stands, the disk is not sound
            raise BadCheckpoint("the manifest is damaged (its bytes differ from what was written)")
        return Manifest.model_validate(body)
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise BadCheckpoint(f"the manifest is damaged ({type(error).__name__})") from error


def verify(folder: Path, *, run_id: str, step: int) -> Manifest:
    """Check every byte of a checkpoint that lies in a folder.

    Raises:
        BadCheckpoint: it is of another run or step, or a file is missing, of wrong size, or of wrong content.
    """
    manifest = read(folder)
    check(manifest, run_id=run_id, step=step, problem_of=lambda name, entry: problem(folder / name, entry))
    return manifest


def check(manifest: Manifest, *, run_id: str, step: int, problem_of: Callable[[str, FileEntry], str]) -> None:
    """Check what a manifest says of itself and, by `problem_of`, called in several threads, each of its files.

    Raises:
        BadCheckpoint: it is of another run or step, or something is wrong with a file.
    """
    if manifest.run_id != run_id:
        raise BadCheckpoint(f"it belongs to run {manifest.run_id!r}")
    if manifest.step != step:
        raise BadCheckpoint(f"its manifest is of step {manifest.step}")
    with ThreadPoolExecutor(min(VERIFY_THREADS, max(1, len(manifest.files)))) as pool:
        found = [text for text in pool.map(problem_of, manifest.files, manifest.files.values()) if text]
    if found:
        raise BadCheckpoint("; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""))


def entry_of(path: Path) -> FileEntry:
    """Return size and SHA-256 of a file."""
    return FileEntry(bytes=path.stat().st_size, sha256=_sha256(path))


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest durably: after this returns, only the folder's rename is missing from the commit."""
    with (folder / NAME).open("wb") as out:
        out.write(manifest.to_bytes())
        out.flush()
        os.fsync(out.fileno())


def problem(path: Path, entry: FileEntry) -> str:
    """Return what is wrong with a file. A disk or a file server that hiccups is asked again: that is no damage."""
    for pause in (*READ_PAUSES, None):
        try:
            size = path.stat().st_size  # of a wrong size, nothing is read
            return difference(path.name, entry, size, _sha256(path) if size == entry.bytes else "")
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            if pause is None:
                return f"{path.name} cannot be read: {error.strerror or error}"
            time.sleep(pause)
    raise AssertionError("the last try has no pause")


def difference(name: str, entry: FileEntry, size: int, sha256: str) -> str:
    """Return in what a file differs from what was written."""
    if size != entry.bytes:
        return f"{name} has {size} bytes instead of {entry.bytes}"
    return "" if sha256 == entry.sha256 else f"{name} has other content than was written (checksum)"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _text(body: dict[str, Any], checksum: str) -> bytes:
    return json.dumps({**body, "sha256": checksum}, indent=1).encode()


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
