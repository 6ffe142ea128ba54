"""The table names every parameter of ours once, and a model that no family holds is told why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain_api.presets import PRESETS, ModelDimensions
from llmtrain_trainer.checkpoint.huggingface.families import MIXTRAL, family_of, parameter_shapes, parts_of
from llmtrain_trainer.checkpoint.huggingface.save import plan_shards, read_parts
from llmtrain_trainer.errors import UserError
from llmtrain_trainer.parallel.pieces import Piece
from tests.unit.trainer.checkpoint.huggingface.folders import (
    EXPERTS,
    MIXTURE,
    make_folder,
    open_folder,
    parts_for,
    write_tensors,
)

HOMELESS = {"demo-moe": "sharedExperts"}
"""Presets that no family holds, and why."""


def with_experts(**changes: object) -> ModelDimensions:
    assert MIXTURE.moe is not None
    return MIXTURE.model_copy(update={"moe": MIXTURE.moe.model_copy(update=changes)})


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in HOMELESS])
def test_every_parameter_of_ours_has_one_name_and_a_field_for_each_dim(preset: str) -> None:
    shapes = parameter_shapes(PRESETS[preset])
    parts = parts_of(family_of(PRESETS[preset]), shapes)
    assert list(dict.fromkeys(part.ours for part in parts)) == list(shapes)
    assert len({part.theirs for part in parts}) == len(parts)
    assert all(len(part.fields) == len(part.shape) for part in parts)
    held = sum(torch.Size(part.shape).numel() for part in parts)
    assert held == PRESETS[preset].parameter_count()


@pytest.mark.parametrize("preset", HOMELESS)
@pytest.mark.parametrize("untrained", [False, True])
def test_a_preset_that_no_family_holds_is_told_which_field_is_why(preset: str, untrained: bool) -> None:
    with pytest.raises(UserError, match=f"spec.model.moe.{HOMELESS[preset]}: "):
        family_of(PRESETS[preset], untrained=untrained)


UNTELLABLE: list[tuple[str, object, tuple[str, ...]]] = [
    ("shared_experts", 1, ("spec.model.moe.sharedExperts: 1: ", "allowed: 0;", "every token passes")),
    ("every_n_layers", 2, ("spec.model.moe.everyNLayers: 2: ", "allowed: 1;", "in every layer")),
    ("top_k", 1, ("spec.model.moe.topK: 1: ", "allowed: 2 or more;", "its chance")),
    ("capacity_factor", 1.25, ("spec.model.moe.capacityFactor: 1.25: ", "allowed: none", "drops no token")),
    ("bias_rate", 0.001, ("spec.model.moe.biasRate: 0.001: ", "allowed: 0;", "no bias")),
]


@pytest.mark.parametrize(("attribute", "value", "words"), UNTELLABLE, ids=[case[0] for case in UNTELLABLE])
def test_a_mixture_that_mixtral_cannot_be_is_refused_with_a_way_out(
    attribute: str, value: object, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        family_of(with_experts(**{attribute: value}))
    assert [word for word in (*words, "; fix: ") if word not in str(caught.value)] == [], str(caught.value)


def test_a_bias_that_training_will_bring_does_not_keep_weights_out() -> None:
    assert family_of(with_experts(bias_rate=0.001), untrained=True) is MIXTRAL


def test_one_parameter_that_stacks_experts_is_many_of_theirs() -> None:
    parts = [part for part in parts_for(MIXTURE) if part.ours == "layers.1.feed_forward.experts.gate.weight"]
    assert [part.theirs for part in parts] == [
        f"model.layers.1.block_sparse_moe.experts.{expert}.w1.weight" for expert in range(4)
    ]
    assert {part.shape for part in parts} == {(8, 8)}


@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
def test_experts_leave_a_checkpoint_and_reach_the_rank_that_holds_them(tmp_path: Path, matrix: str) -> None:
    shapes = parameter_shapes(MIXTURE)
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_tensors(tmp_path / "c", {f"model.{name}": tensor for name, tensor in whole.items()})
    weights = {}
    for number, shard in enumerate(plan_shards(parts_for(MIXTURE), 4, 400)):  # two experts in a file
        save_file(read_parts(tmp_path / "c", shard, torch.float32), tmp_path / f"{number}.safetensors")
        weights |= load_file(tmp_path / f"{number}.safetensors")
    first = open_folder(make_folder(tmp_path / "w", weights, MIXTURE), moe=EXPERTS)
    name = f"layers.1.feed_forward.experts.{matrix}.weight"
    for rows, columns in ((slice(0, 4), slice(0, 6)), (slice(1, 3), slice(2, 5)), (slice(4, 4), slice(0, 6))):
        held = torch.full((rows.stop - rows.start, shapes[name][1], columns.stop - columns.start), torch.nan)
        piece = Piece(shapes[name], (rows.start, 0, columns.start), tuple(held.shape))
        first.fill({name: held}, {name: piece})
        assert torch.equal(held, whole[name][rows, :, columns])
