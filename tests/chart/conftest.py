"""The chart, rendered by the real helm."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain_kind import programs

CHART = Path(__file__).resolve().parents[2] / "charts" / "llmtrain"
NAMESPACE = "llmtrain-system"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The definition is long; libyaml reads it ten times faster."""


@dataclass(frozen=True)
class Helm:
    """helm as a user calls it."""

    program: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.program), *arguments], capture_output=True, text=True, timeout=120, check=False)

    def template(self, *settings: str, release: str = "llmtrain") -> list[dict[str, Any]]:
        """Return the objects of `helm template` with these --set values."""
        flags = [part for setting in settings for part in ("--set-json", setting)]
        done = self.run("template", release, str(CHART), "--namespace", NAMESPACE, *flags)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.load_all(done.stdout, Loader=LOADER) if document]


@pytest.fixture(scope="session")
def helm() -> Helm:
    return Helm(programs.ensure(("helm",)) / "helm")


Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    return helm.template


def one(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """Return the only object of that kind (and, where it is given, name)."""
    found = [o for o in objects if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]
