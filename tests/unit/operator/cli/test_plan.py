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


def test_a_dry_run_says_when_torch_is_missing(
    write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert main(["plan", write(), "--dry-run"]) == 2
    assert "--dry-run: torch is not installed: pip install 'llmtrain[operator,trainer]'" in capsys.readouterr().err
