"""First weights that are not wholly this job's model are refused by name; those that are fill any box."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmtrain_trainer.errors import UserError
from llmtrain_trainer.parallel.pieces import Piece
from tests.unit.trainer.checkpoint.huggingface.folders import (
    ABSENT,
    EXPERTS,
    MIXTURE,
    PARTS,
    make_folder,
    make_shards,
    open_folder,
    some_weights,
    write_index,
)

Q, K, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"
SCALED = {"factor": 8.0, "rope_type": "llama3"}


def _weights(**changes: Any) -> Callable[[Path], object]:
    """One file with some tensors replaced (dots as `__`), or taken out by None."""
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return lambda f: make_folder(f, {n: t for n, t in {**some_weights(), **named}.items() if t is not None})


def _config(**changes: Any) -> Callable[[Path], object]:
    return lambda f: make_folder(f, **changes)


def _mixture(**changes: Any) -> Callable[[Path], object]:
    return lambda f: make_folder(f, dims=MIXTURE, **changes)


def _index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        make_shards(folder)
        write_index(folder, change(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]))

    return make


def _file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        make_folder(folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return make


def _removed(name: str) -> Callable[[Path], object]:
    return lambda f: (make_folder(f) / name).unlink()


def _shard_gone(folder: Path) -> None:
    (make_shards(folder) / "b.safetensors").unlink()


def _shard_cut(folder: Path) -> None:
    path = make_shards(folder) / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _other_format(folder: Path) -> None:
    (make_folder(folder) / "model.safetensors").rename(folder / "pytorch_model.bin")


CASES: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("no folder", lambda f: None, ("there is no folder",)),
    ("no config", _removed("config.json"), ("there is no", "config.json")),
    ("config is no JSON", _file("config.json", lambda b: b[:-1]), ("config.json cannot be read",)),
    ("config is a list", _file("config.json", lambda b: b"[]"), ("is no JSON object",)),
    ("no weights", _removed("model.safetensors"), ("neither model.safetensors nor",)),
    ("weights of another format", _other_format, ("save them as safetensors",)),
    ("truncated file", _file("model.safetensors", lambda b: b[:-1]), ("model.safetensors is damaged",)),
    ("empty file", _file("model.safetensors", lambda b: b""), ("model.safetensors is damaged",)),
    ("truncated shard", _shard_cut, ("b.safetensors is damaged",)),
    ("file of the index gone", _shard_gone, ("names the file 'b.safetensors', which is not in",)),
    ("index outside its folder", _index(lambda m: {n: f"../{f}" for n, f in m.items()}), ("'../a.safetensors'",)),
    ("index without a map", _index(lambda m: None), ("holds no weight_map",)),
    ("index of lists", _index(lambda m: {n: [f] for n, f in m.items()}), ("holds no weight_map",)),
    (
        "index that is wrong",
        _index(lambda m: {**m, Q: ({*m.values()} - {m[Q]}).pop()}),
        (f"says that {Q} is in", "and it is not"),
    ),
    ("missing tensor", _weights(**{Q: None}), (f"no tensor {Q}", "all 21 tensors")),
    ("missing head that is not tied", _weights(**{HEAD: None}), (f"no tensor {HEAD}",)),
    ("many missing", _weights(**{p.theirs: None for p in PARTS[:5]}), ("and 2 more",)),
    ("a bias", _weights(**{"model__layers__0__self_attn__q_proj__bias": torch.ones(8)}), ("q_proj.bias", "no place")),
    ("a third layer", _weights(**{K.replace("1", "2", 1): torch.ones(4, 8)}), ("model.layers.2.self_attn.k_proj",)),
    (
        "wrong shape",
        _weights(**{K: torch.ones(8, 8)}),
        (f"{K} has the shape [8, 8]", "[4, 8]", "model.kvHeads decides"),
    ),
    ("wrong number of dims", _weights(**{K: torch.ones(32)}), ("has the shape [32]", "model.dim and model.kvHeads")),
    ("integers", _weights(**{K: torch.ones(4, 8, dtype=torch.int8)}), ("is of type I8", "F32, BF16, F16")),
    ("another family", _config(model_type="qwen2"), ("model_type is 'qwen2'", "'llama'", "fix: choose weights of")),
    ("a mixture", _mixture(), ("model_type is 'mixtral'", "'llama'", "use a preset with experts, or set model.moe")),
    ("model_type is a list", _config(model_type=["llama"]), ("model_type is ['llama']",)),
    ("other width", _config(hidden_size=16), ("hidden_size is 16", "hidden_size 8", "set model.dim to 16")),
    ("other heads", _config(num_attention_heads=8), ("num_attention_heads is 8", "set model.heads to 8")),
    ("key/value heads left out", _config(num_key_value_heads=None), ("num_key_value_heads is 4", "model.kvHeads to 4")),
    ("no width at all", _config(hidden_size=None), ("hidden_size is None", "complete config.json")),
    ("wide heads", _config(head_dim=64), ("head_dim is 64", "head_dim 2", "hidden_size / num_attention_heads")),
    ("rope_theta", _config(rope_theta=5e5), ("rope_theta is 500000.0", "rope_theta 10000.0", "model.ropeTheta to")),
    ("rope_theta as written now", _config(rope_parameters={"rope_theta": 5e5}), ("rope_theta is 500000.0",)),
    (
        "rms_norm_eps",
        _config(rms_norm_eps=1e-6),
        ("rms_norm_eps is 1e-06", "rms_norm_eps 1e-05", "set model.normEpsilon"),
    ),
    ("rms_norm_eps left out", _config(rms_norm_eps=None), ("rms_norm_eps is 1e-06",)),
    ("rope_scaling", _config(rope_scaling=SCALED), ("rope_scaling is of type 'llama3'", "without scaling")),
    ("rope_scaling of old", _config(rope_scaling={"type": "linear"}), ("of type 'linear'",)),
    ("rope_scaling as written now", _config(rope_parameters=SCALED), ("of type 'llama3'",)),
    ("rope_scaling that is no object", _config(rope_scaling="yarn"), ("of type 'yarn'",)),
    ("half of a head turned", _config(partial_rotary_factor=0.5), ("partial_rotary_factor is 0.5",)),
    ("attention_bias", _config(attention_bias=True), ("attention_bias is True", "attention_bias False alone")),
    ("mlp_bias", _config(mlp_bias=True), ("mlp_bias is True",)),
    ("another activation", _config(hidden_act="gelu"), ("hidden_act is 'gelu'", "hidden_act 'silu' alone")),
    ("quantized", _config(quantization_config={"bits": 4}), ("the weights are quantized",)),
]


@pytest.mark.parametrize(("make", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_not_this_model_is_named(
    tmp_path: Path, make: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    make(tmp_path / "w")
    with pytest.raises(UserError) as caught:
        open_folder(tmp_path / "w")
    text = str(caught.value)
    assert text.startswith(f"spec.model.initFrom: 'file://{tmp_path}/w': ")
    assert "; allowed: " in text and "; fix: " in text
    assert [word for word in words if word not in text] == [], text


GATE = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
CASES_OF_MIXTURES: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("a dense model", make_folder, ("model_type is 'llama'", "'mixtral'", "leave model.moe out")),
    ("other experts", _mixture(num_local_experts=2), ("num_local_experts is 2", "set model.moe.experts to 2")),
    ("experts left out", _mixture(num_local_experts=ABSENT), ("num_local_experts is 8",)),
    ("more at work", _mixture(num_experts_per_tok=4), ("num_experts_per_tok is 4", "set model.moe.topK to 4")),
    ("one at work", _mixture(num_experts_per_tok=1), ("num_experts_per_tok is 1", "2 experts or more per token")),
    ("other width of experts", _mixture(intermediate_size=5), ("intermediate_size is 5", "set model.moe.ffnDim to 5")),
    ("key/value heads left out", _mixture(num_key_value_heads=ABSENT), ("num_key_value_heads is 8", "kvHeads to 8")),
    ("key/value heads null", _mixture(num_key_value_heads=None), ("num_key_value_heads is 4", "kvHeads to 4")),
    ("rope_theta left out", _mixture(rope_theta=ABSENT), ("rope_theta is 1000000.0",)),
    ("short window", _mixture(sliding_window=15), ("sliding_window is 15", "16, and more", "sequenceLength to 15 or")),
    ("window of nothing", _mixture(sliding_window=0), ("sliding_window is 0", "fix: choose other weights")),
    ("window of words", _mixture(sliding_window="all"), ("sliding_window is 'all'",)),
    (
        "all experts in one tensor",
        lambda f: make_folder(f, {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 12, 8)}, MIXTURE),
        ("experts.gate_up_proj holds all experts", "one expert each", "without save_original_format=False"),
    ),
    (
        "no such expert",
        lambda f: make_folder(f, {n: t for n, t in some_weights(MIXTURE).items() if n != GATE}, MIXTURE),
        (f"no tensor {GATE}",),
    ),
    (
        "an expert of another width",
        lambda f: make_folder(f, {**some_weights(MIXTURE), GATE: torch.ones(7, 8)}, MIXTURE),
        (f"{GATE} has the shape [7, 8]", "[8, 8]", "model.moe.ffnDim decides"),
    ),
]


@pytest.mark.parametrize(
    ("make", "words"), [case[1:] for case in CASES_OF_MIXTURES], ids=[case[0] for case in CASES_OF_MIXTURES]
)
def test_what_is_not_this_mixture_is_named(
    tmp_path: Path, make: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    make(tmp_path / "w")
    with pytest.raises(UserError) as caught:
        open_folder(tmp_path / "w", moe=EXPERTS)
    text = str(caught.value)
    assert text.startswith("spec.model.initFrom: ") and "; allowed: " in text and "; fix: " in text
    assert [word for word in words if word not in text] == [], text


HARMLESS: list[tuple[str, Callable[[Path], object]]] = [
    ("as it stands", make_folder),
    ("shards", make_shards),
    ("what llama always is, left out", _config(hidden_act=None, mlp_bias=None, attention_bias=None, rope_theta=None)),
    ("head_dim left out", _config(head_dim=None)),
    ("no scaling, in words of old", _config(rope_scaling={"type": "default"})),
    ("no scaling, in today's words", _config(rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    ("an old buffer", _weights(**{"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)})),
    ("mixed types", _weights(**{K: torch.ones(4, 8, dtype=torch.bfloat16), Q: torch.ones(8, 8).half()})),
]


@pytest.mark.parametrize("make", [case[1] for case in HARMLESS], ids=[case[0] for case in HARMLESS])
def test_what_computes_the_same_is_taken(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "w")
    open_folder(tmp_path / "w")


@pytest.mark.parametrize("window", [None, 16, 4096, ABSENT])
def test_a_mixture_whose_window_is_no_shorter_than_a_sequence_is_taken(tmp_path: Path, window: object) -> None:
    open_folder(make_folder(tmp_path / "w", dims=MIXTURE, sliding_window=window), moe={**EXPERTS, "biasRate": 0.001})


def test_positions_and_norms_may_be_set_to_those_of_the_weights(tmp_path: Path) -> None:
    make_folder(tmp_path / "w", rope_theta=5e5, rms_norm_eps=1e-6)
    open_folder(tmp_path / "w", ropeTheta=500_000, normEpsilon=1e-6)


def test_tied_weights_hide_a_head_that_is_there_as_in_transformers(tmp_path: Path) -> None:
    make_folder(tmp_path / "w", tie_word_embeddings=True)
    found = torch.empty(260, 8)
    whole = Piece((260, 8), (0, 0), (260, 8))
    open_folder(tmp_path / "w").fill({"output.weight": found}, {"output.weight": whole})
    assert torch.equal(found, load_file(tmp_path / "w" / "model.safetensors")["model.embed_tokens.weight"])


def test_other_values_of_one_tensor_are_other_weights(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "w") / "model.safetensors"
    before = open_folder(tmp_path / "w").fingerprint()
    assert open_folder(tmp_path / "w").fingerprint() == before
    save_file({**load_file(path), K: torch.zeros(4, 8)}, path)
    assert open_folder(tmp_path / "w").fingerprint() != before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("weights"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_rank_gets_the_very_box_that_it_holds(folder: Path, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(PARTS))
    offsets = tuple(data.draw(st.integers(0, size)) for size in part.whole)
    sizes = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(part.whole, offsets, strict=True))
    shard = torch.full(sizes, torch.nan)
    open_folder(folder).fill({part.ours: shard}, {part.ours: Piece(part.whole, offsets, sizes)})
    box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    assert torch.equal(shard, load_file(folder / "model.safetensors")[part.theirs][box])
