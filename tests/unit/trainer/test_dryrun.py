"""A dry run lays ranks out by their own code: what it counts is the model, each parameter once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain_api.constants import ExitCode
from llmtrain_api.manifest_io import load_documents
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_trainer.dryrun import DryRun, dry_run

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama-100b.yaml"


def _spec(preset: str, ranks: int, **parallelism: Any) -> LLMTrainJobSpec:
    return LLMTrainJobSpec.model_validate(
        {
            "workers": {"image": "none", "accelerator": {"count": 0}, "ranksPerWorker": ranks},
            "model": {"preset": preset},
            "parallelism": parallelism,
            "training": {"steps": 1, "globalBatchSize": 168},
            "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
            "checkpoint": {"store": "file:///store"},
        }
    )


@pytest.mark.parametrize(
    ("preset", "ranks", "parallelism"),
    [
        ("tiny", 1, {}),
        ("demo", 7, {}),
        ("tiny", 8, {"tensor": 2, "context": 2, "replicate": 2}),
        ("demo", 8, {"tensor": 2, "pipeline": 2}),
        ("demo", 4, {"pipeline": 2, "pipelineSchedule": "ZBV", "zeroStage": 2, "replicate": 2}),
        ("demo", 6, {"zeroStage": 1, "replicate": 2}),
        ("demo", 2, {"zeroStage": 0}),
        ("demo-moe", 8, {"tensor": 2, "expert": 4}),
        ("demo-moe", 12, {"pipeline": 2, "expert": 2}),
    ],
    ids=[
        "one rank",
        "uneven shards",
        "three axes",
        "pipeline",
        "two stages per rank",
        "flat shards",
        "copies",
        "experts",
        "uneven experts",
    ],
)
def test_the_pieces_of_all_ranks_are_the_model(preset: str, ranks: int, parallelism: dict[str, Any]) -> None:
    found = dry_run(_spec(preset, ranks, **parallelism), list(range(ranks)))
    assert sum(rank.share for rank in found.ranks) == pytest.approx(found.parameters, rel=1e-12)
    for rank in found.ranks:
        assert rank.parameter_bytes == rank.gradient_bytes == 4 * rank.parameters
        assert rank.optimizer_bytes == 2 * rank.parameter_bytes


def test_lion_remembers_half() -> None:
    spec = _spec("tiny", 2)
    training = spec.training.model_copy(
        update={"optimizer": spec.training.optimizer.model_copy(update={"name": "lion"})}
    )
    [first] = dry_run(spec.model_copy(update={"training": training})).ranks
    assert first.optimizer_bytes == first.parameter_bytes


def _run(spec: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmtrain_trainer.dryrun", *arguments]
    return subprocess.run(command, input=json.dumps(spec), capture_output=True, text=True, check=False, timeout=280)


def test_a_hundred_billion_parameters_on_1024_ranks() -> None:
    """One rank of each pipeline stage speaks for its peers: every matrix of this model is shared out evenly."""
    [manifest] = load_documents(EXAMPLE.read_text(encoding="utf-8"), EXAMPLE.name)
    stages = manifest["spec"]["parallelism"]["pipeline"]
    peers = 1024 // stages
    answer = _run(manifest["spec"], *(f"--rank={number * peers}" for number in range(stages)))
    assert answer.returncode == 0, answer.stderr
    found = DryRun.model_validate_json(answer.stdout)
    assert found.world_size == 1024
    assert found.parameters > 100e9
    assert sum(rank.share for rank in found.ranks) * peers == pytest.approx(found.parameters, rel=1e-12)


def test_what_cannot_be_laid_out_is_said_in_one_line() -> None:
    spec = _spec("tiny", 6, tensor=4).to_wire()
    answer = _run(spec)
    assert answer.returncode == ExitCode.USER_ERROR
    assert answer.stderr.startswith("error: spec.parallelism.tensor: 4")
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stdout == ""


def test_a_rank_that_the_job_has_not_is_wrong_usage() -> None:
    answer = _run(_spec("tiny", 2).to_wire(), "--rank=2")
    assert answer.returncode == 2
    assert "--rank 2: the job has the ranks 0 to 1" in answer.stderr
