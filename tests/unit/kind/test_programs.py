"""The programs of a cluster: their modules, versions, and builds that are killed or run at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmtrain_kind import catalogue, go_toolchain, programs
from llmtrain_kind.errors import Refused
from llmtrain_kind.folders import KIND_FOLDER, MODULES_FOLDER


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of the test's own for programs; Go and its caches stay where they are."""
    monkeypatch.setattr(programs, "programs_folder", lambda: tmp_path / "programs")
    return tmp_path / "programs"


@pytest.mark.parametrize("family", [f for f in catalogue.families() if f.root], ids=lambda family: family.name)
def test_the_committed_module_has_the_version_of_the_catalogue(family: catalogue.Family) -> None:
    text = (MODULES_FOLDER / family.name / "go.mod").read_text()
    required = re.search(rf"^(?:require )?\s*{re.escape(family.root)} v(\S+)", text, re.MULTILINE)
    assert required and required[1] == family.version
    sums = (MODULES_FOLDER / family.name / "go.sum").read_text()
    assert f"{family.root} v{family.version} " in sums
    assert "://" not in text + sums


def test_every_program_has_one_name_and_one_family() -> None:
    names = [program for family in catalogue.families() for program in family.packages]
    assert len(names) == len(set(names))
    assert not {"kind", "versitygw", "promtool"} & set(catalogue.local_programs())
    assert set(catalogue.CLIENTS) <= set(catalogue.local_programs())


def test_an_unknown_program_is_refused_with_those_there_are(own_folder: Path) -> None:
    with pytest.raises(Refused, match=r"unknown program kubeadm; there are: kube-apiserver"):
        programs.ensure(("kubectl", "kubeadm"))


def test_another_kubernetes_version_gets_a_module_of_its_own_staging_list() -> None:
    original = """module k8s.io/kubernetes

go 1.25.0

replace (
\tk8s.io/api => ./staging/src/k8s.io/api
\tk8s.io/client-go => ./staging/src/k8s.io/client-go
)
"""
    assert programs.kubernetes_go_mod(original, "1.35.4") == (
        "module llmtrain.invalid/kubernetes\n\ngo 1.25.0\n\nrequire k8s.io/kubernetes v1.35.4\n\nreplace (\n"
        "\tk8s.io/api => k8s.io/api v0.35.4\n\tk8s.io/client-go => k8s.io/client-go v0.35.4\n)\n"
    )


def test_a_version_is_built_into_the_programs() -> None:
    flags = catalogue.kubernetes("1.35.4").linker_flags()
    assert "gitVersion=v1.35.4" in flags and "gitMinor=35" in flags


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("module x\n\ngo 1.26.8\n", (1, 26, 8), id="three numbers"),
        pytest.param("module x\ngo 1.26\n", (1, 26, 0), id="two numbers"),
        pytest.param("module x\n", (1, 21, 0), id="none"),
    ],
)
def test_the_needed_go_is_read_from_the_module(tmp_path: Path, text: str, expected: tuple[int, int, int]) -> None:
    (tmp_path / "go.mod").write_text(text)
    assert go_toolchain.needed_version(tmp_path / "go.mod") == expected


def test_builders_at_once_build_once_and_a_killed_ones_rest_is_cleared(own_folder: Path) -> None:
    rest = own_folder / ".pause-1.tmp" / "pause.folder"
    rest.mkdir(parents=True)
    (rest / "pause").write_text("half a program")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: programs.ensure(("pause",)), range(4)))
    assert len(folders) == 1
    shown = sorted(path.name for path in own_folder.iterdir() if not path.name.startswith("."))
    assert shown == ["bin-1.36.3", "pause-1"]
    assert not rest.exists()
    process = subprocess.Popen([folders.pop() / "pause"])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.terminate()
    assert process.wait(30) == 0


def test_the_command_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """It runs before any environment exists: isolated, without site-packages, from any folder."""
    command = [sys.executable, "-I", "-S", str(KIND_FOLDER / "cluster"), "status", "--name", "nobody"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 1
    assert "there is no cluster nobody" in done.stderr
