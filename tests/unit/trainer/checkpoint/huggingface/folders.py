"""Folders and stores for tests of Hugging Face weights, made without transformers and without ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from llmtrain_api.launch import RankLaunch
from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint.huggingface import config_json
from llmtrain_trainer.checkpoint.huggingface.families import Part, family_of, parameter_shapes, parts_of
from llmtrain_trainer.checkpoint.huggingface.load import FirstWeights
from llmtrain_trainer.checkpoint.manifest import Manifest
from llmtrain_trainer.checkpoint.store import CheckpointStore
from llmtrain_trainer.config import RunConfig

SIZES = {"dim": 8, "layers": 2, "heads": 4, "kvHeads": 2, "ffnDim": 12, "vocabSize": 260, "sequenceLength": 16}
ABSENT = "absent"
"""Takes a key out of config.json."""
DIMENSIONS = ModelDimensions.model_validate(SIZES)
EXPERTS = {"experts": 4, "ffnDim": 8}
MIXTURE = ModelDimensions.model_validate({**SIZES, "moe": {**EXPERTS, "topK": 2}})
SHAPES = parameter_shapes(DIMENSIONS)


def parts_for(dims: ModelDimensions) -> list[Part]:
    return parts_of(family_of(dims), parameter_shapes(dims))


PARTS = parts_for(DIMENSIONS)


def some_weights(dims: ModelDimensions = DIMENSIONS) -> dict[str, Tensor]:
    """Return random tensors by their names."""
    return {part.theirs: torch.randn(part.shape) for part in parts_for(dims)}


def make_folder(
    folder: Path, weights: dict[str, Tensor] | None = None, dims: ModelDimensions = DIMENSIONS, **config: Any
) -> Path:
    """Write what save_pretrained would: one file of weights (some, where none are given), and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(some_weights(dims) if weights is None else weights, folder / "model.safetensors")
    content = {**config_json.write(family_of(dims), dims, "float32"), **config}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value != ABSENT}))
    return folder


def make_shards(folder: Path) -> Path:
    """As make_folder, in two files with an index."""
    weights = some_weights()
    make_folder(folder, weights)
    (folder / "model.safetensors").unlink()
    files: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, tensor) in enumerate(weights.items()):
        files["ab"[number % 2] + ".safetensors"][name] = tensor
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    write_index(folder, {name: file for file, tensors in files.items() for name in tensors})
    return folder


def write_index(folder: Path, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def config_of(uri: str, **model: Any) -> RunConfig:
    spec = {
        "workers": {"image": "none", "device": "cpu"},
        "model": {**SIZES, "initFrom": uri, **model},
        "training": {"steps": 1},
        "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
        "checkpoint": {"store": "file:///nowhere"},
    }
    place = {"attempt": 1, "global_rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1, "local_world_size": 1}
    where = {"master_address": "127.0.0.1", "master_port": 1, "error_file": ""}
    return RunConfig.of(RankLaunch.model_validate({"run_id": "a/b", "spec": spec, **place, **where}))


def open_folder(folder: Path, **model: Any) -> FirstWeights:
    uri = f"file://{folder}"
    return FirstWeights(config_of(uri, **model), uri)


def write_tensors(folder: Path, state: dict[str, Tensor]) -> None:
    """Write a checkpoint's files without ranks; no manifest."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def make_store(root: Path, *steps: int, without: str = "", dims: ModelDimensions = DIMENSIONS) -> Path:
    """Commit checkpoints of random weights in a store, `without` one of our parameters."""
    store = CheckpointStore(root, uri=f"file://{root}", run_id="a/b", attempt=1)
    store.claim()
    shapes = parameter_shapes(dims)
    for step in steps:
        state = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items() if name != without}
        folder = store.begin(step)
        write_tensors(folder, state)
        files = {path.name: manifests.entry_of(path) for path in [*folder.glob("*.distcp"), folder / ".metadata"]}
        store.commit(_manifest(step, files, dims))
    return root


def _manifest(step: int, files: dict[str, manifests.FileEntry], dims: ModelDimensions) -> Manifest:
    numbers: dict[str, Any] = {"attempt": 1, "step": step, "samples": 8, "loss": 1.0, "world_size": 1, "replicate": 1}
    prints = {"spec_fingerprint": "", "data_fingerprint": "", "created_at": 0.0}
    return Manifest(run_id="a/b", job_uid="", model=dims, files=files, **numbers, **prints)
