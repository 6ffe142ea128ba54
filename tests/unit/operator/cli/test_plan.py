"""`llmtrain plan`: what it prints, and its exit codes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain_operator.cli.main import main
from tests.unit.api.manifests import base, patched

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(**patch: Any) -> str:
        path = tmp_path / "job.yaml"
        changes = {name.replace("__", "."): value for name, value in patch.items()}
        path.write_text(json.dumps(patched(base(), changes)))
        return str(path)

    return write


def test_the_fastest_come_first_and_the_files_own_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "llama-8b.yaml"), "--top", "3"]) == 0
    said = capsys.readouterr().out
    assert "llama-8b on h100" in said
    assert "> replicate 2, zeroStage 3," in said
    for heading in ("fits", "weights", "gradients", "optimizer", "activations", "step s", "tokens/s", "MFU", "idle"):
        assert heading in said


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "llama-8b.yaml"), "--machine", "h200", "--top", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == "h200"
    assert len(found["best"]) == 2
    assert found["best"][0]["stepSeconds"] <= found["best"][1]["stepSeconds"]
    assert found["asked"]["parallelism"]["replicate"] == 2
    memory = found["asked"]["memoryBytes"]
    assert memory["total"] == pytest.approx(sum(memory[part] for part in memory if part != "total"), abs=4)
    assert found["nearest"] is None


def test_where_nothing_fits_it_says_what_would_help(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workers = {"replicas": 1, "image": "trainer:1"}
    file = write(spec__workers=workers, spec__model__preset="llama-70b", spec__training__globalBatchSize=64)
    assert main(["plan", file]) == 1
    said = capsys.readouterr().err
    assert "no layout fits h100; allowed: 80.4 GB for a rank; the nearest, tensor 8" in said
    assert "fix: set workers.replicas to" in said


def test_a_job_without_accelerators_is_planned_for_a_cpu(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write()]) == 0
    assert "case on cpu" in capsys.readouterr().out


def test_a_job_with_plan_for_is_planned_for_that_machine_and_the_choice_is_marked(
    write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(spec__parallelism={"planFor": "a100"}, spec__training__globalBatchSize=2)
    assert main(["plan", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == "a100"
    assert found["asked"] == found["best"][0]
    assert main(["plan", file]) == 0
    said = capsys.readouterr().out
    assert said.count(" > ") == 1
    assert "> will be chosen, because parallelism.planFor is a100" in said


def test_on_another_machine_the_choice_stays_that_for_plan_for(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(spec__parallelism={"planFor": "cpu"}, spec__model__preset="demo")
    assert main(["plan", file, "--json", "--top", "1"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert main(["plan", file, "--json", "--top", "1", "--machine", "b200"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert here["machine"] == "b200"
    assert here["asked"]["parallelism"] == there["asked"]["parallelism"] != here["best"][0]["parallelism"]


def test_where_plan_for_finds_nothing_nothing_is_marked(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(spec__parallelism={"planFor": "cpu"}, spec__model__preset="llama-8b")
    assert main(["plan", file]) == 1
    said = capsys.readouterr()
    assert " > " not in said.out and "Nothing fits cpu, which parallelism.planFor names" in said.out
    assert "no layout fits cpu; allowed: 8.0 GB for all ranks of a worker together; the nearest, " in said.err
    assert main(["plan", file, "--machine", "b200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"] is None
    assert main(["plan", file, "--dry-run"]) == 2
    assert "--dry-run: spec.parallelism.planFor: no layout fits cpu" in capsys.readouterr().err


def test_a_batch_that_no_layout_can_share_out_is_told(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    patch = {"preset": "tiny", "kvHeads": 1, "layers": 1, "sequenceLength": 63, "heads": 4}
    assert (
        main(
            ["plan", write(spec__parallelism={"planFor": "h100"}, spec__model=patch, spec__training__globalBatchSize=1)]
        )
        == 1
    )
    said = capsys.readouterr()
    assert "0 legal divisions" in said.out
    assert "no layout is legal, on h100 or elsewhere; allowed: a job that some layout can share out" in said.err
    assert "spec.training.globalBatchSize is 1, and allowed: a multiple of 4 (workers.replicas 2 x 2 ranks" in said.err


def test_a_wrong_manifest_is_answered_as_by_the_other_commands(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write(spec__parallelism={"tensor": 3})]) == 2
    said = capsys.readouterr().err
    assert "llmtrain plan: " in said
    assert "spec.parallelism.tensor: 3 is refused; allowed: a divisor of" in said


@pytest.mark.parametrize("arguments", [["--top", "0"], ["--machine", "abacus"]])
def test_wrong_options_are_refused(write: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", write(), *arguments])
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_dry_run_counts_real_shards(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(spec__parallelism={"pipeline": 2})
    assert main(["plan", file, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["dryRun"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2]
    assert sum(2 * rank["parameters"] for rank in found["ranks"]) == found["parameters"]
    assert main(["plan", file, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "parameters on 4 ranks" in said
    assert "sends in a step, estimated: " in said


def test_a_dry_run_lays_out_what_will_be_chosen(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                write(spec__parallelism={"planFor": "cpu"}, spec__training__globalBatchSize=2),
                "--dry-run",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["asked"]["parallelism"]["pipeline"] == 2
    assert [rank["rank"] for rank in found["dryRun"]["ranks"]] == [0, 2]


def test_a_dry_run_says_when_torch_is_missing(
    write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert main(["plan", write(), "--dry-run"]) == 2
    assert "--dry-run: torch is not installed: pip install 'llmtrain[operator,trainer]'" in capsys.readouterr().err
