"""No field may exist that does nothing: the operator, the trainer or the job's own methods read each of them."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from llmtrain_api.generate import ROOT
from llmtrain_api.spec import LLMTrainJobSpec

READERS = [
    *(ROOT / "operator").rglob("*.py"),
    *(ROOT / "trainer").rglob("*.py"),
    ROOT / "crds" / "llmtrain_api" / "spec.py",
    ROOT / "crds" / "llmtrain_api" / "presets.py",
]
COMMON_NAMES = {"kind", "name", "model", "count", "spec", "image", "uri", "data", "store", "keep", "device"}
"""Attributes that many other objects have too: a field of this name must be read from its own parent."""
SPEC = LLMTrainJobSpec.__name__


def _models(kind: object, seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind not in seen:
            seen.add(kind)
            yield kind
            for info in kind.model_fields.values():
                yield from _models(info.annotation, seen)
    else:
        for argument in typing.get_args(kind):
            yield from _models(argument, seen)


def _fields() -> list[tuple[str, str]]:
    models = list(_models(LLMTrainJobSpec, set()))
    return [(model.__name__, name) for model in models for name in model.model_fields]


def _reads() -> set[str]:
    """Attribute names, and 'parent.attribute' pairs, that some module reads; names in strings count for getattr."""
    found: set[str] = set()
    for file in READERS:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
                owner = node.value
                parent = (
                    owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
                )
                found.add(f"{parent}.{node.attr}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    return found


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


READS = _reads()


@pytest.mark.parametrize(("model", "field"), _fields(), ids=lambda name: name)
def test_the_field_is_read_somewhere(model: str, field: str) -> None:
    if field not in COMMON_NAMES:
        assert field in READS
        return
    parent = {SPEC: "spec", "PodTemplate": "template", "DataSource": "source"}.get(model)
    parent = parent or re.sub(r"(?<!^)(?=[A-Z])", "_", model).lower()
    owners = {parent, "self"} if model == "Model" else {parent}
    assert any(f"{owner}.{field}" in READS for owner in owners), f"{parent}.{field} is read nowhere"
