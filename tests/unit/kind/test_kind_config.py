"""The configuration of the `kind` provider, and image archives."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from llmtrain_kind import archives, kind_config
from llmtrain_kind.errors import Refused
from llmtrain_kind.settings import ClusterSettings


def rendered(kubernetes: str) -> dict[str, object]:
    settings = ClusterSettings("c", "kind", 2, kubernetes, (("/torch", "/opt/torch"),))
    return dict(json.loads(kind_config.render(settings, Path("/state/shared"), Path("/state/audit"))))


def test_every_node_of_kind_sees_the_shared_folder_and_the_mounts() -> None:
    nodes = rendered("1.36.3")["nodes"]
    assert isinstance(nodes, list)
    assert [node["role"] for node in nodes] == ["control-plane", "worker", "worker"]
    for node in nodes:
        mounts = {mount["hostPath"]: mount for mount in node["extraMounts"]}
        assert mounts["/state/shared"]["containerPath"] == kind_config.SHARED_ON_NODES
        assert mounts["/torch"]["readOnly"] is True


@pytest.mark.parametrize(
    ("kubernetes", "version", "path", "value"),
    [
        pytest.param(
            "1.36.3",
            "v1beta4",
            "/apiServer/extraArgs/-",
            {"name": "audit-log-path", "value": "/llmtrain/audit/audit.jsonl"},
            id="a list from 1.36 on",
        ),
        pytest.param(
            "1.35.4",
            "v1beta3",
            "/apiServer/extraArgs/audit-log-path",
            "/llmtrain/audit/audit.jsonl",
            id="a map before",
        ),
    ],
)
def test_arguments_are_added_in_the_form_that_kinds_kubeadm_version_has(
    kubernetes: str, version: str, path: str, value: object
) -> None:
    patches = rendered(kubernetes)["kubeadmConfigPatchesJSON6902"]
    assert isinstance(patches, list)
    assert patches[0]["version"] == version
    assert {"op": "add", "path": path, "value": value} in json.loads(patches[0]["patch"])


def test_a_version_without_a_node_image_is_refused() -> None:
    with pytest.raises(Refused, match=r"node images for 1\.34, 1\.35, 1\.36, 1\.37"):
        kind_config.node_image("1.30.0")


def tar_of(path: Path, files: dict[str, object]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            data = json.dumps(content).encode()
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("files", "names"),
    [
        pytest.param(
            {"index.json": {"manifests": [{"annotations": {"io.containerd.image.name": "localhost/a:1"}}]}},
            ("localhost/a:1",),
            id="OCI layout",
        ),
        pytest.param({"manifest.json": [{"RepoTags": ["localhost/a:1"]}]}, ("localhost/a:1",), id="docker save"),
        pytest.param({"manifest.json": [{"RepoTags": ["a:1"]}]}, ("docker.io/library/a:1",), id="short name"),
        pytest.param({"manifest.json": [{"RepoTags": ["me/a:1"]}]}, ("docker.io/me/a:1",), id="name of a user"),
        pytest.param(
            {"index.json": {"manifests": [{}]}, "manifest.json": [{"RepoTags": ["localhost/a:1"]}]},
            ("localhost/a:1",),
            id="both, named in the second",
        ),
    ],
)
def test_the_names_in_an_archive_are_found(tmp_path: Path, files: dict[str, object], names: tuple[str, ...]) -> None:
    assert archives.read(tar_of(tmp_path / "a.tar", files)).names == names


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"other": 1}, id="no index"),
        pytest.param({"index.json": {"manifests": [{}]}}, id="no name"),
        pytest.param({"index.json": 5}, id="nonsense"),
    ],
)
def test_what_is_no_archive_is_refused(tmp_path: Path, files: dict[str, object]) -> None:
    with pytest.raises(Refused, match="not an image archive"):
        archives.read(tar_of(tmp_path / "a.tar", files))


def test_the_digest_follows_the_content_not_the_file(tmp_path: Path) -> None:
    index = {"manifests": [{"digest": "sha256:1", "annotations": {"io.containerd.image.name": "localhost/a:1"}}]}
    first = archives.read(tar_of(tmp_path / "a.tar", {"index.json": index}))
    again = archives.read(tar_of(tmp_path / "b.tar", {"x": 1, "index.json": index}))
    index["manifests"][0]["digest"] = "sha256:2"
    other = archives.read(tar_of(tmp_path / "c.tar", {"index.json": index}))
    assert first.digest == again.digest != other.digest
