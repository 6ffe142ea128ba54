"""What a manifest says of a run apart from the files: who made the checkpoint, of what, in which layout."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from llmtrain_trainer.checkpoint.manifest import FileEntry, Manifest
from llmtrain_trainer.checkpoint.outcome import Position
from llmtrain_trainer.config import RunConfig


def manifest_of(
    config: RunConfig, position: Position, data_fingerprint: str, files: Mapping[str, FileEntry]
) -> Manifest:
    """Return the manifest of a checkpoint made now."""
    launch, shape = config.launch, config.shape
    return Manifest(
        id=uuid.uuid4().hex,
        run_id=launch.run_id,
        job_uid=launch.job_uid,
        attempt=launch.attempt,
        step=position.step,
        samples=position.samples,
        loss=position.loss,
        world_size=launch.world_size,
        replicate=shape.dp_replicate,
        tensor=shape.tp,
        context=shape.cp,
        pipeline=shape.pp,
        expert=shape.ep,
        optimizer=config.spec.training.optimizer.name,
        model=config.dimensions,
        spec_fingerprint=spec_fingerprint(config),
        layout_fingerprint=layout_fingerprint(config),
        data_fingerprint=data_fingerprint,
        versions=_versions(),
        created_at=time.time(),
        files=dict(files),
    )


def spec_fingerprint(config: RunConfig) -> str:
    """Return a hash of what decides the numbers: training, data and the model, not where they run."""
    spec = config.spec
    return _hash([spec.training.to_wire(), spec.data.to_wire(), config.dimensions.to_wire()])


def layout_fingerprint(config: RunConfig) -> str:
    """Return a hash of what decides what a rank holds, under which names, and on which worker it runs.

    Versions are in it: another one may hold other parts, and only the store can be read whatever its layout.
    """
    launch = config.launch
    return _hash([config.spec.parallelism.to_wire(), launch.world_size, launch.local_world_size, _versions()])


def _versions() -> dict[str, str]:
    return {"llmtrain": version("llmtrain"), "torch": torch.__version__}


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
