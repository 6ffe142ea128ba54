"""Every example is valid as it stands, and says what the README and the demo say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain_api.generate import ROOT
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.manifest_io import load_documents
from llmtrain_api.planning.decision import layout_problems
from llmtrain_api.validation import validate

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def _load(path: Path) -> dict[str, Any]:
    (manifest,) = load_documents(path.read_text(), path.name)
    return manifest


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_example_is_valid(path: Path) -> None:
    manifest = _load(path)
    assert validate(manifest) == []
    assert layout_problems(manifest) == []
    assert LLMTrainJob.parse(manifest).metadata.name == path.stem


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_example_says_in_its_first_line_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_a_small_job_needs_ten_lines() -> None:
    lines = [line for line in (ROOT / "examples" / "hello.yaml").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) <= 10


@pytest.mark.parametrize(
    ("name", "ranks", "accelerators"), [("hello", 1, 0), ("demo", 4, 8), ("llama-8b", 128, 8)], ids=str
)
def test_the_shape_is_what_the_comment_says(name: str, ranks: int, accelerators: int) -> None:
    spec = LLMTrainJob.parse(_load(ROOT / "examples" / f"{name}.yaml")).spec
    assert (spec.world_size(), spec.workers.accelerator.count) == (ranks, accelerators)
