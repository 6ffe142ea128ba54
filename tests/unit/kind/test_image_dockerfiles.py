"""The Dockerfiles make what kind/images-build makes: every list is read from the same file, every constant is compared.

No Docker is needed: the files are parsed.
"""

from __future__ import annotations

import fnmatch
import json
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llmtrain_kind import images
from llmtrain_kind.images_spec import load_spec, read_list

ROOT = Path(__file__).resolve().parents[3]
SPEC = load_spec(ROOT)


@dataclass
class Stage:
    """One FROM of a Dockerfile and the instructions below it, as (name, arguments)."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [arguments for instruction, arguments in self.instructions if instruction == name]

    def only(self, name: str) -> str:
        (arguments,) = self.all(name)
        return arguments


def parse_dockerfile(path: Path) -> tuple[dict[str, str], list[Stage]]:
    """The ARGs before the first FROM, and the stages."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        elif instruction == "ARG" and not stages:
            key, _, value = rest.partition("=")
            arguments[key] = value
        elif instruction:
            stages[-1].instructions.append((instruction, " ".join(rest.split())))
    return arguments, stages


Dockerfile = tuple[str, dict[str, str], list[Stage]]


@pytest.fixture(params=sorted(SPEC.images))
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    arguments, stages = parse_dockerfile(ROOT / request.param / "Dockerfile")
    return request.param, arguments, stages


def test_dockerfile_stands_on_the_debian_release_of_the_archive(dockerfile: Dockerfile) -> None:
    _, arguments, stages = dockerfile
    assert arguments == {"BASE_IMAGE": f"debian:{SPEC.suite}-slim"}
    assert [(stage.base, stage.name) for stage in stages] == [
        ("${BASE_IMAGE}", "base"),
        ("base", "build"),
        ("base", ""),
    ]


def test_dockerfile_installs_debian_packages_from_the_shared_list_only(dockerfile: Dockerfile) -> None:
    _, _, (base, build, final) = dockerfile
    assert base.all("COPY") == ["kind/images/apt.txt /tmp/apt.txt"]
    install = base.all("RUN")[0]
    assert "sed 's/#.*//' /tmp/apt.txt" in install
    assert install.count("apt-get install") == 1
    # Nothing after the options: the names come from the list alone.
    assert "xargs apt-get install -y --no-install-recommends && rm" in install
    # What only the build needs is in a stage that is thrown away.
    assert final.all("RUN") == []
    assert final.only("COPY") == f"--from=build {SPEC.prefix} {SPEC.prefix}"
    assert "python3-venv" in build.all("RUN")[0]


def test_the_dockerfiles_way_to_read_the_list_gives_what_the_archive_builder_reads() -> None:
    by_sed = subprocess.run(
        ["sed", "s/#.*//", ROOT / "kind/images/apt.txt"], capture_output=True, text=True, check=True
    )
    assert by_sed.stdout.split() == list(SPEC.apt)
    assert f"python{SPEC.python}" == "python3.11" and "python3" in SPEC.apt


def test_dockerfile_installs_python_packages_from_the_extras_and_constraints_only(dockerfile: Dockerfile) -> None:
    image, _, (_, build, _) = dockerfile
    runs = build.all("RUN")
    installs = [run for run in runs if "uv pip install" in run]
    dependencies, code = installs
    assert f"images_wheel.py requirements {image} > /tmp/requirements.txt" in dependencies
    assert dependencies.endswith(
        f"--python {SPEC.prefix}/bin/python --only-binary :all: --constraints constraints.txt "
        "--requirements /tmp/requirements.txt"
    )
    assert f"images_wheel.py split {image} " in code
    assert "--no-deps --offline /tmp/half/llmtrain-*.whl" in code
    assert f"python3 -m venv --without-pip {SPEC.prefix}" in runs
    if SPEC.images[image].mount_path:  # as images_warm.py does for the archive
        assert runs.pop() == f"{SPEC.prefix}/bin/python3 -m llmtrain_trainer.warmup --bake > /dev/null"
    compile_ours = runs[-1]
    assert compile_ours.endswith(f"--invalidation-mode unchecked-hash /{SPEC.site_packages}/llmtrain_*")


def test_dockerfile_runs_as_the_archive_does(dockerfile: Dockerfile) -> None:
    image, _, (base, _, final) = dockerfile
    spec = SPEC.images[image]
    assert f"--gid {SPEC.uid} llmtrain" in base.all("RUN")[1]
    assert f"--uid {SPEC.uid} --gid {SPEC.uid} --home-dir {SPEC.home}" in base.all("RUN")[1]
    assert final.only("USER") == f"{SPEC.uid}:{SPEC.uid}"
    assert final.only("WORKDIR") == SPEC.home
    assert json.loads(final.only("ENTRYPOINT")) == list(spec.entrypoint)
    assert dict(pair.split("=", 1) for pair in shlex.split(final.only("ENV"))) == SPEC.env
    labels = dict(pair.split("=", 1) for pair in shlex.split(final.only("LABEL")))
    config = images._config(SPEC, spec)
    assert labels.keys() == config.labels.keys() - {"org.opencontainers.image.created"}
    for key in labels.keys() - {"org.opencontainers.image.version"}:
        assert labels[key] == config.labels[key]


def test_dockerfile_takes_no_secret_and_copies_only_what_the_context_holds(dockerfile: Dockerfile) -> None:
    _, _, stages = dockerfile
    rules = read_list(ROOT / ".dockerignore")
    assert rules[0] == "*"
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    for stage in stages:
        words = " ".join(f"{name} {rest}" for name, rest in stage.instructions).upper()
        assert not any(word in words for word in ("TOKEN", "PASSWORD", "SECRET", "--MOUNT"))
        for copy in stage.all("COPY"):
            if copy.startswith("--from="):
                continue
            for source in copy.split()[:-1]:
                assert (ROOT / source).exists()
                assert any(source == rule or source.startswith(rule + "/") for rule in allowed), source


@pytest.mark.parametrize("secret", [".git/config", ".env", "build/images/x.tar", ".venv/bin/python", "kind/x.key"])
def test_build_context_leaves_out(secret: str) -> None:
    rules = read_list(ROOT / ".dockerignore")
    kept = False
    for rule in rules:
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = [secret, *(str(parent) for parent in Path(secret).parents)]
        if any(fnmatch.fnmatch(part, pattern) for part in parts):
            kept = rule.startswith("!")
    assert not kept
