from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Job, RankHost, merged

pytestmark = pytest.mark.distributed

TEXT = "".join(f"{n} squared is {n * n}, and its cube is {n**3}.\n" for n in range(2000))

SMALL: dict[str, Any] = {
    "workers": {"image": "none", "accelerator": {"count": 0}, "device": "cpu"},
    "model": {
        "dim": 32,
        "layers": 2,
        "heads": 4,
        "kvHeads": 2,
        "ffnDim": 48,
        "vocabSize": 260,
        "sequenceLength": 16,
    },
    "training": {
        "steps": 6,
        "globalBatchSize": 8,
        "precision": "fp32",
        "optimizer": {"learningRate": 1e-3},
        "schedule": {"warmupSteps": 2},
    },
    "checkpoint": {"everySteps": 2, "keep": 10},
}
"""Smaller than any preset: a step takes some tens of milliseconds."""


@pytest.fixture(scope="session")
def host() -> Iterator[RankHost]:
    host = RankHost()
    yield host
    host.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.txt").write_text(TEXT[::-1])
    return folder


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred documents, several of which share a sequence."""
    file = tmp_path_factory.mktemp("short") / "documents.jsonl"
    words = TEXT.split()[:600]
    texts = (" ".join(words[start : start + 1 + start % 3]) for start in range(0, len(words), 3))
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    return file


@pytest.fixture(scope="session")
def unhurt_losses(
    host: RankHost, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, Any]], list[float]]:
    """Tell the losses of a run of two ranks that nothing disturbs: unhurt_losses(changes of the spec)."""
    known: dict[str, list[float]] = {}

    def losses(changes: dict[str, Any]) -> list[float]:
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("unhurt")
            spec = merged(SMALL, {"data": {"sources": [{"uri": f"file://{corpus}"}]}})
            job = Job(host, folder, merged(spec, changes), run_id="tests/unhurt")
            gang = job.run(2)
            assert gang.wait() == [0, 0], gang.output()
            known[key] = job.losses()
        return known[key]

    return losses


@pytest.fixture
def new_job(host: RankHost, corpus: Path, tmp_path: Path) -> Callable[..., Job]:
    """Make jobs in folders of their own: new_job(name, **changes of the spec)."""

    def make(name: str = "job", **changes: Any) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        base = merged(SMALL, {"data": {"sources": [{"uri": f"file://{corpus}"}]}})
        return Job(host, folder, merged(base, changes), run_id=f"tests/{name}", work_dir=tmp_path / "work")

    return make
