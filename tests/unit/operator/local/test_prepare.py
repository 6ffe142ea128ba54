"""Before a run: whose folder, which spec, which volumes, which ports."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from llmtrain_api.job import LLMTrainJob
from llmtrain_operator.local.losses import newest_losses
from llmtrain_operator.local.ports import BLOCKS, END_PORT, FIRST_PORT, PORTS_PER_RUN, candidate_ports
from llmtrain_operator.local.prepare import LocalRun, prepare
from llmtrain_operator.local.records import LocalStateError
from llmtrain_operator.local.volumes import claims_of, store_folder
from tests.unit.operator.local.test_records import MANIFEST


def changed(path: str, value: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(MANIFEST)
    place: Any = manifest
    *parents, last = path.split(".")
    for parent in parents:
        place = place[parent]
    place[last] = value
    return manifest


def begin(state: Path, manifest: dict[str, Any] = MANIFEST, **options: Any) -> Any:
    """Prepare a run and let go of it."""
    prepared = prepare(LocalRun(manifest, state, **options))
    prepared.records.release()
    return prepared


def test_the_same_manifest_again_takes_up_the_same_job(tmp_path: Path) -> None:
    first = begin(tmp_path)
    assert begin(tmp_path).manifest == first.manifest
    assert begin(tmp_path, fresh=True).manifest["metadata"]["uid"] != first.manifest["metadata"]["uid"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.training", {"steps": 20}, "spec.training.steps: 20 now, but 10"),
        ("spec.parallelism", {"zeroStage": 2}, "spec.parallelism: {'zeroStage': 2} now, but left out"),
        ("spec.model", {}, "spec.model.preset: left out now, but 'tiny'"),
    ],
    ids=["changed", "added", "removed"],
)
def test_another_spec_is_refused_with_the_place_and_the_fix(path: str, value: Any, said: str, tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(LocalStateError) as caught:
        begin(tmp_path, changed(path, value))
    assert said in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_another_spec_is_taken_afresh(tmp_path: Path) -> None:
    begin(tmp_path)
    manifest = changed("spec.training", {"steps": 20})
    assert begin(tmp_path, manifest, fresh=True).manifest["spec"] == manifest["spec"]


def test_labels_are_no_change_of_the_spec(tmp_path: Path) -> None:
    begin(tmp_path)
    begin(tmp_path, changed("metadata.labels", {"team": "one"}))


def test_a_refusal_lets_go_of_the_folder(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(LocalStateError):
        prepare(LocalRun(changed("spec.training", {"steps": 20}), tmp_path))
    begin(tmp_path)


def test_claims_get_folders_of_the_state_and_keep_them(tmp_path: Path) -> None:
    prepared = begin(tmp_path)
    folder = tmp_path / "default.job" / "volumes" / "checkpoints"
    assert prepared.volumes == {"checkpoints": str(folder)}
    assert folder.is_dir()
    assert begin(tmp_path).volumes == prepared.volumes


def test_a_volume_that_was_given_is_kept_for_the_next_run(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert begin(tmp_path, volumes={"checkpoints": str(disk)}).volumes == {"checkpoints": str(disk)}
    assert begin(tmp_path).volumes == {"checkpoints": str(disk)}


@pytest.mark.parametrize(
    ("claim", "folder", "said"),
    [
        ("corpus", "disk", "the job uses no claim 'corpus'; it uses: checkpoints"),
        ("checkpoints", "nowhere", "there is no such folder"),
    ],
    ids=["unknown claim", "no folder"],
)
def test_a_volume_that_cannot_be_is_refused(claim: str, folder: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with pytest.raises(LocalStateError, match=said):
        begin(tmp_path, volumes={claim: str(tmp_path / folder)})


def test_a_run_keeps_its_volumes(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "disk").mkdir()
    with pytest.raises(LocalStateError, match=r"has begun with .*; leave the option out"):
        begin(tmp_path, volumes={"checkpoints": str(tmp_path / "disk")})
    disk = str(tmp_path / "disk")
    assert begin(tmp_path, volumes={"checkpoints": disk}, fresh=True).volumes == {"checkpoints": disk}


def test_claims_are_those_of_store_sources_tokenizer_first_weights_and_event_files() -> None:
    manifest = changed(
        "spec.data",
        {
            "sources": [{"uri": "pvc://corpus/en"}, {"uri": "file:///data"}, {"uri": "builtin://python-stdlib"}],
            "tokenizer": {"uri": "pvc://words/tokenizer.json"},
        },
    )
    manifest["spec"]["model"]["initFrom"] = "pvc://weights/llama"
    manifest["spec"]["metrics"] = {"tensorboard": {"uri": "pvc://boards/case"}}
    assert claims_of(LLMTrainJob.parse(manifest)) == ["boards", "checkpoints", "corpus", "weights", "words"]


@pytest.mark.parametrize(
    ("store", "folder"),
    [("pvc://checkpoints/job", "/disk/job"), ("file:///else/where", "/else/where"), ("s3://bucket/job", None)],
    ids=str,
)
def test_where_the_store_lies(store: str, folder: str | None) -> None:
    job = LLMTrainJob.parse(changed("spec.checkpoint", {"store": store}))
    assert store_folder(job, {"checkpoints": "/disk"}) == (Path(folder) if folder else None)


def test_the_last_port_is_tried_first_and_every_block_once(tmp_path: Path) -> None:
    ports = list(candidate_ports(tmp_path, 12_345))
    assert ports[0] == 12_345
    assert len(set(ports)) == len(ports) == BLOCKS + 1
    assert all(FIRST_PORT <= port <= END_PORT - PORTS_PER_RUN for port in ports[1:])
    assert all((port - FIRST_PORT) % PORTS_PER_RUN == 0 for port in ports[1:])


def test_a_folder_always_begins_at_the_same_port(tmp_path: Path) -> None:
    assert list(islice(candidate_ports(tmp_path, None), 3)) == list(islice(candidate_ports(tmp_path, None), 3))


@pytest.mark.parametrize(
    ("content", "losses"),
    [
        (None, ()),
        (b"", ()),
        (b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n', (3.0, 2.0)),
        (b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n', (3.0, 1.5)),
        (b'{"step": 1, "loss": 3.0}\n{"step": 2, "lo', (3.0,)),
        (b'\xff\xfe\n{"event": "started"}\n[]\n{"step": 9, "loss": 1.0}\n', (1.0,)),
    ],
    ids=["no file", "empty", "two", "a step repeated", "half a line", "other lines"],
)
def test_the_newest_losses(content: bytes | None, losses: tuple[float, ...], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert newest_losses(tmp_path, 60) == losses


def test_only_so_many_losses_of_a_long_run(tmp_path: Path) -> None:
    lines = "".join(f'{{"step": {step}, "loss": {step}.0, "more": "{"x" * 400}"}}\n' for step in range(1, 2001))
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert newest_losses(tmp_path, 3) == (1998.0, 1999.0, 2000.0)
