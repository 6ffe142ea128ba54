"""Write a verified checkpoint, of whatever layout, as a folder that transformers loads: never half of one."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from llmtrain_trainer.checkpoint import state as states
from llmtrain_trainer.checkpoint.huggingface import config_json
from llmtrain_trainer.checkpoint.huggingface.families import Part, family_of, parameter_shapes, parts_of
from llmtrain_trainer.checkpoint.huggingface.folder import INDEX, SINGLE, WEIGHT_MAP
from llmtrain_trainer.checkpoint.manifest import Manifest
from llmtrain_trainer.parallel.pieces import Piece

SHARD_BYTES = 5_000_000_000
"""Of the largest file, where nobody says otherwise."""


@dataclass(frozen=True)
class Written:
    """What a folder holds."""

    files: int
    """With tensors."""
    bytes: int
    """Of all tensors."""


def save(checkpoint: Path, manifest: Manifest, out: Path, *, dtype: torch.dtype, max_shard_bytes: int) -> Written:
    """Write config.json and safetensors to `out`, which does not exist or is an empty folder.

    Holds one file's tensors in memory at a time, and the piece that is being read. Everything lies in a folder beside
    `out` until it is whole.

    Raises:
        UserError: transformers has no form for this model.
        CheckpointError: the checkpoint cannot be read although it verified.
        OSError: `out` cannot be written, or is not empty.
    """
    family = family_of(manifest.model)
    parts = parts_of(family, parameter_shapes(manifest.model))
    shards = plan_shards(parts, dtype.itemsize, max_shard_bytes)
    names = (
        [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in _count(shards)]
    )
    total = sum(_bytes_of(part, dtype.itemsize) for part in parts)
    with _whole_or_not_at_all(out) as folder:
        _write_json(folder / config_json.NAME, config_json.write(family, manifest.model, str(dtype).split(".")[-1]))
        for name, shard in zip(names, shards, strict=True):
            _write_shard(folder / name, read_parts(checkpoint, shard, dtype))
        if len(shards) > 1:
            places = {part.theirs: name for name, shard in zip(names, shards, strict=True) for part in shard}
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, WEIGHT_MAP: places})
    return Written(len(shards), total)


def plan_shards(parts: Iterable[Part], item_bytes: int, max_bytes: int) -> list[list[Part]]:
    """Return which tensors share a file, in their order. One that is larger than a file may be has its own."""
    shards: list[list[Part]] = [[]]
    used = 0
    for part in parts:
        size = _bytes_of(part, item_bytes)
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(part)
        used += size
    return shards


def read_parts(checkpoint: Path, parts: Iterable[Part], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors of theirs by their name, cast to `dtype`. Those that one of our parameters stacks share memory.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    boxes: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for ours, group in groupby(parts, key=lambda part: part.ours):
        run = list(group)  # of one parameter, and of neighbours in it
        first = run[0]
        sizes = first.whole if first.index is None else (len(run), *first.shape)
        box = torch.empty(sizes, dtype=dtype)
        offsets = (first.index or 0, *(0 for _ in sizes[1:]))
        boxes[f"model.{ours}"] = Piece(first.whole, offsets, sizes).describe(box)
        found |= {part.theirs: box if part.index is None else box[number] for number, part in enumerate(run)}
    states.read(checkpoint, boxes)
    return found


@contextmanager
def _whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """Give a folder to write into, which becomes `out` when the block has succeeded and goes away when it has not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.parent / f".{out.name}.{uuid.uuid4().hex}.tmp"
    staging.mkdir()
    try:
        yield staging
        _to_disk(staging)
        staging.rename(out)  # takes the place of an empty folder, and of no other
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _to_disk(out.parent)


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode  # as the user's mask wants it; the library may write for its owner alone
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error
    path.chmod(mode)
    _to_disk(path)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _to_disk(path)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _bytes_of(part: Part, item_bytes: int) -> int:
    return torch.Size(part.shape).numel() * item_bytes


def _count(shards: list[list[Part]]) -> range:
    return range(1, len(shards) + 1)
