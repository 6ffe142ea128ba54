"""The table names every parameter of ours once, and has room for a family that stacks experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain_api.presets import PRESETS
from llmtrain_trainer.checkpoint.huggingface import load
from llmtrain_trainer.checkpoint.huggingface.families import LLAMA, Names, family_of, parameter_shapes, parts_of
from llmtrain_trainer.checkpoint.huggingface.save import plan_shards, read_parts
from llmtrain_trainer.parallel.pieces import Piece
from tests.unit.trainer.checkpoint.huggingface.folders import make_folder, open_folder, write_tensors

GATE = "layers.{n}.feed_forward.experts_gate"
EXPERTS = replace(
    LLAMA,
    names={**LLAMA.names, GATE: Names("model.layers.{n}.block_sparse_moe.experts.{e}.w1.weight", ("ffnDim", "dim"))},
)
"""Made up here: how a mixture of experts would be told."""
STACKED = {"layers.1.feed_forward.experts_gate": (4, 6, 8), "norm.weight": (8,)}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_of_ours_has_one_name_and_a_field_for_each_dim(preset: str) -> None:
    shapes = parameter_shapes(PRESETS[preset])
    parts = parts_of(family_of(PRESETS[preset]), shapes)
    assert [part.ours for part in parts] == list(shapes)
    assert len({part.theirs for part in parts}) == len(parts)
    assert all(len(part.fields) == len(part.shape) for part in parts)


def test_one_parameter_that_stacks_experts_is_many_of_theirs() -> None:
    parts = parts_of(EXPERTS, STACKED)
    assert [part.theirs for part in parts[:-1]] == [
        f"model.layers.1.block_sparse_moe.experts.{expert}.w1.weight" for expert in range(4)
    ]
    assert {part.shape for part in parts[:-1]} == {(6, 8)}


def test_experts_leave_a_checkpoint_and_reach_the_rank_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {name: torch.randn(shape) for name, shape in STACKED.items()}
    write_tensors(tmp_path / "c", {f"model.{name}": tensor for name, tensor in whole.items()})
    weights = {}
    for number, shard in enumerate(plan_shards(parts_of(EXPERTS, STACKED), 4, 400)):  # two experts in a file
        save_file(read_parts(tmp_path / "c", shard, torch.float32), tmp_path / f"{number}.safetensors")
        weights |= load_file(tmp_path / f"{number}.safetensors")
    monkeypatch.setattr(load, "family_of", lambda dims: EXPERTS)
    monkeypatch.setattr(load, "parameter_shapes", lambda dims: STACKED)
    first = open_folder(make_folder(tmp_path / "w", weights))
    name = next(iter(STACKED))
    for rows, columns in ((slice(0, 4), slice(0, 8)), (slice(1, 3), slice(2, 5)), (slice(4, 4), slice(0, 8))):
        held = torch.full((rows.stop - rows.start, 6, columns.stop - columns.start), torch.nan)
        piece = Piece(STACKED[name], (rows.start, 0, columns.start), tuple(held.shape))
        first.fill({name: held}, {name: piece})
        assert torch.equal(held, whole[name][rows, :, columns])
