"""The generated files are what the types say, and a drift is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llmtrain_api.crdgen import crd, crd_file
from llmtrain_api.generate import ROOT, generated_files, main
from llmtrain_api.manifest_io import load_documents


def test_the_files_in_the_repository_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(generated_files()))
def test_a_drifted_file_is_named_and_mended(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(tmp_path)]
    assert main(root) == 0
    assert main([*root, "--check"]) == 0
    (tmp_path / name).write_text("edited by hand")
    capsys.readouterr()
    assert main([*root, "--check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{name} is not what crds/llmtrain_api says: run `make generate` and commit it"
    ]
    assert main(root) == 0
    assert capsys.readouterr().out == f"wrote {name}\n"
    assert main([*root, "--check"]) == 0


def test_a_missing_file_is_a_drift(tmp_path: Path) -> None:
    assert main(["--root", str(tmp_path), "--check"]) == 1


def test_both_yaml_versions_read_the_definition_as_it_was_meant() -> None:
    """kubectl reads YAML 1.1 with its own additions, our own loader 1.2."""
    assert yaml.safe_load(crd_file()) == crd()
    assert load_documents(crd_file(), "crd") == [crd()]


def test_no_line_ends_in_a_space() -> None:
    for name, text in generated_files().items():
        assert [line for line in text.splitlines() if line != line.rstrip()] == [], name


def test_the_reference_has_a_row_for_every_field() -> None:
    text = (ROOT / "docs/reference/llmtrainjob.md").read_text()
    for path in ("spec.training.optimizer.learningRate", "spec.data.sources[].uri", "status.failures[].lostSteps"):
        assert f"| `{path}` |" in text
