"""Weights go to Hugging Face transformers and come from it without a change of a bit, in every layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from llmtrain_api.presets import PRESETS, ModelDimensions
from llmtrain_trainer import export
from llmtrain_trainer.checkpoint import state
from llmtrain_trainer.checkpoint.huggingface import config_json
from llmtrain_trainer.checkpoint.huggingface.families import MIXTRAL, family_of, parameter_shapes, parts_of
from llmtrain_trainer.data.loader import Loader
from llmtrain_trainer.data.order import SampleOrder
from llmtrain_trainer.data.tokenizer import ByteTokenizer
from llmtrain_trainer.errors import UserError
from llmtrain_trainer.model.transformer import Transformer, rotary_tables
from tests.support.ranks import Job, merged

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

DIMENSIONS = ModelDimensions(
    dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=260, sequence_length=16
)  # of the job that conftest.py makes
EXPERTS = {"moe": {"experts": 4, "topK": 3, "ffnDim": 32}, "ropeTheta": 5e5, "normEpsilon": 1e-6}
"""Of spec.model; positions and norms are other than usual, too. With topK equal to layers, our balance loss and
theirs would be the same."""
MIXTURE = ModelDimensions.model_validate({**DIMENSIONS.to_wire(), **EXPERTS})
LOGITS = 1e-5
LOSS = 1e-6
STILL: dict[str, Any] = {
    "training": {"steps": 1, "optimizer": {"learningRate": 1e-30, "weightDecay": 0}},
    "checkpoint": {"everySteps": 1},
}
"""One step that is too short to change a weight: its checkpoint holds the first weights."""
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("one-file", 1, {}),
    ("shards", 1, {}),
    ("shards", 2, {}),
    ("one-file", 2, {"tensor": 2}),
    ("shards", 4, {"tensor": 2}),
    ("one-file", 4, {"context": 2, "replicate": 2}),
]
EXPERT_LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("experts", 1, {}),
    ("experts-in-shards", 2, {"expert": 2}),
    ("experts", 2, {"tensor": 2}),
    ("experts-in-shards", 4, {"pipeline": 2, "expert": 2}),
]


def sizes(dims: ModelDimensions) -> dict[str, Any]:
    """Return what LlamaConfig and MixtralConfig are told of our dimensions."""
    return {
        "hidden_size": dims.dim,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "intermediate_size": dims.moe.ffn_dim if dims.moe else dims.ffn_dim,
        "vocab_size": dims.vocab_size,
        "rms_norm_eps": dims.norm_epsilon,
        "rope_parameters": {"rope_theta": dims.rope_theta, "rope_type": "default"},
        "max_position_embeddings": dims.sequence_length,
        "initializer_range": 0.1,
    }


def llama(**changes: Any) -> Any:
    """Return a LlamaForCausalLM of our dimensions with random values."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds: only for whom runs these tests

    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**{**sizes(DIMENSIONS), **changes})).eval()


def mixtral() -> Any:
    """Return a MixtralForCausalLM of our dimensions with random values."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(7)
    assert MIXTURE.moe is not None
    experts = {"num_local_experts": MIXTURE.moe.experts, "num_experts_per_tok": MIXTURE.moe.top_k}
    return MixtralForCausalLM(MixtralConfig(**sizes(MIXTURE), **experts)).eval()


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def our_logits(checkpoint: Path, tokens: Tensor, dims: ModelDimensions) -> Tensor:
    """Return what our model gives, filled from a checkpoint by our own names."""
    model = empty(dims)
    state.read(checkpoint, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
    with torch.no_grad():
        return model(tokens, rotary_tables(dims, torch.device("cpu")))


def empty(dims: ModelDimensions) -> Transformer:
    """Return our model with any values, its routers without history."""
    model = Transformer(dims)
    for mixture in model.mixtures().values():
        mixture.router.reset()
    return model


def their_logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits.float()


def some_tokens() -> Tensor:
    return torch.randint(0, DIMENSIONS.vocab_size, (4, DIMENSIONS.sequence_length))


def finished(job: Job, ranks: int, **changes: Any) -> Job:
    gang = job.run(ranks, changes=changes)
    assert gang.wait() == [0] * ranks, gang.output()
    return job


def export_to(folder: Path, job: Job, *options: str) -> Path:
    assert export.main([str(job.store), str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The weights of a dense model and of a mixture, each as one file and as several."""
    names = ("one-file", "shards", "experts", "experts-in-shards")
    folders = {name: tmp_path_factory.mktemp("theirs") / name for name in names}
    for model, whole, cut in ((llama(), *names[:2]), (mixtral(), *names[2:])):
        model.save_pretrained(folders[whole])
        model.save_pretrained(folders[cut], max_shard_size="20KB")
        assert len(list(folders[cut].glob("*.safetensors"))) > 3
    return folders


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "demo-moe"])  # which no family holds
def test_a_config_means_the_same_to_transformers_and_to_us(preset: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    dims = PRESETS[preset]
    family = family_of(dims)
    ours = config_json.write(family, dims, "float32")
    (tmp_path / "config.json").write_text(json.dumps(ours))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters == {"rope_theta": dims.rope_theta, "rope_type": "default"}
    assert {key: getattr(read, key) for key in family.dimensions if key != "rope_theta"} == {
        key: attrgetter(name)(dims) for key, name in family.dimensions.items() if key != "rope_theta"
    }
    read.save_pretrained(tmp_path)
    assert list(config_json.differences(config_json.read(tmp_path, UserError), family, dims)) == []
    assert list(config_json.differences(ours, family, dims)) == []


@pytest.mark.parametrize(
    ("dims", "changes"),
    [(DIMENSIONS, {}), (MIXTURE, {"model": EXPERTS, "parallelism": {"expert": 2}})],
    ids=["dense", "mixture"],
)
def test_a_checkpoint_of_two_ranks_gives_the_same_logits_in_transformers(
    new_job: Callable[..., Job], tmp_path: Path, dims: ModelDimensions, changes: dict[str, Any]
) -> None:
    job = finished(new_job(), 2, **changes)
    out = export_to(tmp_path / "out", job)
    tokens = some_tokens()
    ours, theirs = our_logits(job.store / "step-00000006", tokens, dims), their_logits(loaded(out), tokens)
    assert (ours - theirs).abs().max() <= LOGITS
    earlier = their_logits(loaded(export_to(tmp_path / "earlier", job, "--step", "2")), tokens)
    assert (earlier - our_logits(job.store / "step-00000002", tokens, dims)).abs().max() <= LOGITS
    assert (earlier - theirs).abs().max() > LOGITS


def test_a_large_model_is_written_as_files_of_the_size_that_was_asked_for(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = finished(new_job(), 2, parallelism={"tensor": 2})
    whole = tensors_in(export_to(tmp_path / "whole", job))
    out = export_to(tmp_path / "out", job, "--dtype", "bf16", "--max-shard-bytes", "20000")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    assert all(file.stat().st_size <= 20_000 + 2_000 or len(load_file(file)) == 1 for file in files)
    found = tensors_in(out)
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in found.values())
    assert {name: t.to(torch.bfloat16).tolist() for name, t in whole.items()} == {
        n: t.tolist() for n, t in found.items()
    }
    assert loaded(out).dtype == torch.bfloat16
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "nothing half-written is left"
    assert files[0].stat().st_mode == (out / "config.json").stat().st_mode


@pytest.mark.parametrize(
    ("saved", "dims", "layouts"),
    [("one-file", DIMENSIONS, LAYOUTS), ("experts", MIXTURE, EXPERT_LAYOUTS)],
    ids=["dense", "mixture"],
)
def test_weights_of_theirs_start_every_layout_alike_and_come_back_bit_for_bit(
    new_job: Callable[..., Job],
    theirs: dict[str, Path],
    tmp_path: Path,
    saved: str,
    dims: ModelDimensions,
    layouts: list[tuple[str, int, dict[str, Any]]],
) -> None:
    source = tensors_in(theirs[saved])
    expected = _first_loss(loaded(theirs[saved]), new_job("corpus"))
    tokens = some_tokens()
    logits = their_logits(loaded(theirs[saved]), tokens)
    for number, (folder, ranks, parallelism) in enumerate(layouts):
        model = {"initFrom": f"file://{theirs[folder]}", **(EXPERTS if dims.moe else {})}
        job = finished(
            new_job(f"layout-{number}"), ranks, **merged(STILL, {"model": model, "parallelism": parallelism})
        )
        assert abs(job.losses()[0] - expected) <= LOSS, (folder, ranks, parallelism)
        back = tensors_in(export_to(tmp_path / f"back-{number}", job))
        assert sorted(back) == sorted(source)
        assert all(torch.equal(back[name], source[name]) for name in source), (folder, ranks, parallelism)
        assert (our_logits(job.store / "step-00000001", tokens, dims) - logits).abs().max() <= LOGITS


def _first_loss(model: Any, job: Job) -> float:
    """Return the loss of transformers over the batch of a job's first step."""
    (source,) = job.spec["data"]["sources"]
    files = sorted(Path(source["uri"].removeprefix("file://")).iterdir())
    tokens = np.concatenate([ByteTokenizer().encode(file.read_text()) for file in files])
    order = SampleOrder((len(tokens) - 1) // DIMENSIONS.sequence_length, 1234)
    inputs, targets = Loader(tokens, order, DIMENSIONS.sequence_length).batch(range(8))
    logits = their_logits(model, inputs).double()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def test_the_balance_loss_pulls_routers_in_transformers_as_hard_as_here(theirs: dict[str, Path]) -> None:
    assert MIXTURE.moe is not None
    dims = MIXTURE.model_copy(update={"moe": MIXTURE.moe.model_copy(update={"z_coefficient": 0.0})})
    model, tokens = empty(dims), some_tokens()
    source, parameters = tensors_in(theirs["experts"]), dict(model.named_parameters())
    with torch.no_grad():
        for part in parts_of(MIXTRAL, parameter_shapes(dims)):
            ours = parameters[part.ours]
            (ours if part.index is None else ours[part.index]).copy_(source[part.theirs])
    routers = [mixture.router for mixture in model.mixtures().values()]
    rotary = rotary_tables(dims, torch.device("cpu"))
    model(tokens, rotary)
    chosen = torch.stack([router.choices for router in routers]).sum(dim=0)  # theirs has one load for all layers
    for router in routers:
        router.load.copy_(chosen / chosen.sum())
        router.loss_scale = 1.0 / tokens.numel()
    (0.0 * model(tokens, rotary).sum()).backward()  # the balance loss alone
    other = loaded(theirs["experts"])
    weight = config_json.write(MIXTRAL, dims, "float32")["router_aux_loss_coef"]
    (weight * other(tokens, output_router_logits=True).aux_loss).backward()
    for router, layer in zip(routers, other.model.layers, strict=True):
        assert router.weight.grad is not None and router.weight.grad.abs().max() > 1e-6
        torch.testing.assert_close(router.weight.grad, layer.mlp.gate.weight.grad, rtol=1e-4, atol=1e-8)


def test_tied_weights_of_half_the_width_and_old_buffers_are_taken(new_job: Callable[..., Job], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    llama(tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path / "tied")
    source = tensors_in(tmp_path / "tied")
    assert "lm_head.weight" not in source
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
    save_file({**source, **old}, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    job = finished(new_job(), 2, **merged(STILL, {"model": {"initFrom": f"file://{tmp_path}/tied"}}))
    back = tensors_in(export_to(tmp_path / "back", job))
    assert torch.equal(back.pop("lm_head.weight"), source["model.embed_tokens.weight"].float())
    assert sorted(back) == sorted(source)
    assert all(torch.equal(back[name], source[name].float()) for name in source)


def test_a_job_with_a_checkpoint_no_longer_looks_at_its_first_weights(
    new_job: Callable[..., Job], theirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(theirs["one-file"], tmp_path / "first")
    first = {"model": {"initFrom": f"file://{tmp_path}/first"}}
    job = new_job(**merged(first, {"checkpoint": {"everySteps": 1}}))
    gang = job.run(2, changes={"training": {"steps": 1}})
    assert gang.wait() == [0, 0] and gang.events("initialised")[0]["source"] == f"file://{tmp_path}/first"
    shutil.rmtree(tmp_path / "first")
    again = job.run(2, changes={"training": {"steps": 2}})
    assert again.wait() == [0, 0], again.output()
    assert again.events("resumed")[0]["step"] == 1 and not again.events("initialised")


def test_wrong_first_weights_end_every_rank_before_a_step(
    new_job: Callable[..., Job], theirs: dict[str, Path], tmp_path: Path
) -> None:
    job = new_job(model={"initFrom": f"file://{theirs['shards']}", "kvHeads": 4})
    gang = job.run(2)
    assert gang.wait()[0] == 64 and set(gang.wait()) <= {64, 75}, gang.output()
    assert "spec.model.initFrom" in gang.error()["message"] and "model.kvHeads" in gang.error()["message"]
    assert not gang.last_step() and not job.checkpoints()


def test_workers_that_see_different_first_weights_are_told_so(
    new_job: Callable[..., Job], theirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(theirs["one-file"], tmp_path / "volume-0" / "w")
    llama(initializer_range=0.2).save_pretrained(tmp_path / "volume-1" / "w")
    mounts = {"per_rank": lambda rank: {"volumes": {"disk": str(tmp_path / f"volume-{rank}")}}, "nodes": 2}
    gang = new_job().launch(2, changes={"model": {"initFrom": "pvc://disk/w"}}, **mounts)
    assert gang.wait()[1] == 64, gang.output()
    assert "worker 1 sees other weights than worker 0" in gang.error(1)["message"]
