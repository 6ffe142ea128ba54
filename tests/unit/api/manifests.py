"""A valid manifest, and how a case of the table differs from it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

ABSENT = object()
"""As a value in a patch: take the field away."""


def base() -> dict[str, Any]:
    """A valid manifest: 2 workers x 2 ranks. Its managedBy names nobody, so that no operator acts on it."""
    return {
        "apiVersion": "llmtrain.dev/v1alpha1",
        "kind": "LLMTrainJob",
        "metadata": {"name": "case"},
        "spec": {
            "suspend": True,
            "managedBy": "tests.llmtrain.dev/nobody",
            "workers": {"replicas": 2, "ranksPerWorker": 2, "device": "cpu", "image": "trainer:1"},
            "model": {"preset": "tiny"},
            "training": {"steps": 20, "globalBatchSize": 8},
            "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
            "checkpoint": {"store": "pvc://checkpoints/case"},
        },
    }


def patched(manifest: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which each dotted path has a new value; a number in a path is an index."""
    out = copy.deepcopy(manifest)
    for path, value in patch.items():
        *parents, leaf = path.split(".")
        target: Any = out
        for step in parents:
            target = target[int(step)] if isinstance(target, list) else target.setdefault(step, {})
        if value is ABSENT:
            target.pop(leaf, None)
        elif isinstance(target, list):
            target[int(leaf)] = value
        else:
            target[leaf] = value
    return out


@dataclass(frozen=True)
class Case:
    """A manifest, and what is wrong with it."""

    name: str
    patch: dict[str, Any]
    problems: tuple[str, ...] = ()
    """Paths that are blamed; empty: accepted."""
    words: tuple[str, ...] = ()
    """What the messages must hold: the value, what is allowed, the fix."""
    api_problems: tuple[str, ...] | None = None
    """Where an API server blames other paths; None: the same."""
    python_only: bool = False
    """True: an API server cannot see it."""
    old: dict[str, Any] | None = field(default=None)
    """For an update: the patch that made the object it replaces."""

    def manifest(self) -> dict[str, Any]:
        return patched(base(), self.patch)

    def old_manifest(self) -> dict[str, Any] | None:
        return None if self.old is None else patched(base(), self.old)
