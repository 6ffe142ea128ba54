"""An export is whole or not there; what cannot be exported is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer import export
from llmtrain_trainer.checkpoint import state
from llmtrain_trainer.checkpoint.huggingface.families import Part, parameter_shapes
from llmtrain_trainer.checkpoint.huggingface.save import plan_shards
from llmtrain_trainer.parallel.pieces import Piece
from tests.unit.trainer.checkpoint.huggingface.folders import (
    DIMENSIONS,
    EXPERTS,
    MIXTURE,
    PARTS,
    SIZES,
    make_folder,
    make_store,
    open_folder,
    parts_for,
)


@pytest.mark.parametrize(("dims", "model"), [(DIMENSIONS, {}), (MIXTURE, {"moe": EXPERTS})], ids=["dense", "mixture"])
def test_what_is_written_is_what_first_weights_may_be(
    tmp_path: Path, dims: ModelDimensions, model: dict[str, Any]
) -> None:
    shapes = parameter_shapes(dims)
    store = make_store(tmp_path / "store", 3, dims=dims)
    assert export.main([str(store), str(tmp_path / "out"), "--max-shard-bytes", "1000"]) == 0
    held = {f"model.{name}": torch.empty(shape) for name, shape in shapes.items()}
    state.read(store / "step-00000003", held)
    found = {f"model.{name}": torch.empty(shape) for name, shape in shapes.items()}
    weights = open_folder(tmp_path / "out", **model)
    pieces = {name: _whole(shape) for name, shape in shapes.items()}
    weights.fill({name: found[f"model.{name}"] for name in shapes}, pieces)
    assert all(torch.equal(found[name], held[name]) for name in held)


def _whole(shape: tuple[int, ...]) -> Piece:
    return Piece(shape, (0,) * len(shape), shape)


def test_the_newest_checkpoint_that_verifies_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path / "store", 3, 5)
    (store / "step-00000005" / ".metadata").write_bytes(b"damaged")
    assert export.main([str(store), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert ": step 3, " in said.out and "in 1 file(s)" in said.out
    assert "skipped step-00000005" in said.err


def test_nothing_in_the_store_is_changed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", 3)
    (store / "step-00000004.attempt-1.tmp").mkdir()
    before = {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]}
    assert export.main([str(store), str(tmp_path / "out")]) == 0
    assert {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]} == before


def test_an_empty_folder_is_filled_and_missing_parents_are_made(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", 3)
    (tmp_path / "empty").mkdir()
    assert export.main([str(store), str(tmp_path / "empty")]) == 0
    assert export.main([str(store), str(tmp_path / "a" / "b")]) == 0
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]


def _full(folder: Path) -> list[str]:
    make_folder(folder / "out")
    return [str(make_store(folder / "store", 3)), str(folder / "out")]


def _file(folder: Path) -> list[str]:
    (folder / "out").touch()
    return [str(make_store(folder / "store", 3)), str(folder / "out")]


def _below_a_file(folder: Path) -> list[str]:
    (folder / "file").touch()
    return [str(make_store(folder / "store", 3)), str(folder / "file" / "out")]


def _damaged(folder: Path) -> list[str]:
    store = make_store(folder / "store", 3)
    (store / "step-00000003" / ".metadata").write_bytes(b"damaged")
    return [str(store), str(folder / "out")]


def _incomplete(folder: Path) -> list[str]:
    """A checkpoint that verifies and lacks the last tensor: the failure comes when other files are written."""
    store = make_store(folder / "store", 3, without="output.weight")
    return [str(store), str(folder / "out"), "--max-shard-bytes", "1000"]


BIASED = ModelDimensions.model_validate({**SIZES, "moe": {**EXPERTS, "topK": 2, "biasRate": 0.01}})
REFUSED: list[tuple[str, Callable[[Path], list[str]], int, tuple[str, ...]]] = [
    ("OUT is not empty", _full, 64, ("OUT: ", "is not empty", "an empty folder", "choose another")),
    ("OUT is a file", _file, 64, ("OUT: ", "it is no folder")),
    ("OUT below a file", _below_a_file, 64, ("OUT: ", "cannot be written")),
    ("no store", lambda f: [str(f), str(f / "out")], 64, ("STORE: ", "owner.json cannot be read")),
    ("empty store", lambda f: [str(make_store(f / "s")), str(f / "o")], 64, ("STORE: ", "no checkpoint has been")),
    (
        "no such step",
        lambda f: [str(make_store(f / "s", 3, 5)), str(f / "o"), "--step", "4"],
        64,
        ("--step: '4'", "3, 5"),
    ),
    ("damaged", _damaged, 77, ("step-00000003: .metadata has",)),
    ("the step asked for is damaged", lambda f: [*_damaged(f), "--step", "3"], 77, ("step 3 in", ".metadata has")),
    (
        "a mixture that no family holds",
        lambda f: [str(make_store(f / "s", 3, dims=BIASED)), str(f / "o")],
        64,
        ("spec.model.moe.biasRate: 0.01: ", "has no bias", "allowed: 0", "fix: "),
    ),
    ("incomplete", _incomplete, 77, ("verifies but cannot be loaded", "model.output.weight")),
]


@pytest.mark.parametrize(("make", "code", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_exported_leaves_nothing_behind(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], list[str]],
    code: int,
    words: tuple[str, ...],
) -> None:
    arguments = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert export.main(arguments) == code
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == [], said
    assert said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        export.main(["store", "out", "--max-shard-bytes", "0"])
    assert "use a whole number of bytes, 1 or more" in capsys.readouterr().err


@given(st.integers(1, 20_000), st.sampled_from([2, 4]), st.sampled_from([PARTS, parts_for(MIXTURE)]))
def test_files_hold_every_tensor_once_in_order_and_are_no_larger_than_allowed(
    most: int, item: int, parts: list[Part]
) -> None:
    shards = plan_shards(parts, item, most)
    assert [part for shard in shards for part in shard] == parts
    for shard in shards:
        assert len(shard) == 1 or sum(torch.Size(part.shape).numel() * item for part in shard) <= most


def test_config_json_says_what_llama_needs(tmp_path: Path) -> None:
    assert export.main([str(make_store(tmp_path / "store", 3)), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "bfloat16"
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 1e4, 2)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_config_json_says_what_mixtral_needs(tmp_path: Path) -> None:
    assert export.main([str(make_store(tmp_path / "store", 3, dims=MIXTURE)), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["MixtralForCausalLM"] and config["model_type"] == "mixtral"
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (4, 2, 8)
    assert config["sliding_window"] is None and config["rope_theta"] == 1e4
    assert "attention_bias" not in config and "mlp_bias" not in config
