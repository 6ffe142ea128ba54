"""All that is wrong with a manifest, at once: each field with its value, what is allowed, and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from llmtrain_api import constants as c
from llmtrain_api.crdgen import job_schema
from llmtrain_api.explain import describe, did_you_mean, fix_for, letters, shorten
from llmtrain_api.rule import Rule, Scope
from llmtrain_api.rules import RULES
from llmtrain_api.spec import DISK_PATTERN, IMAGE_PATTERN, RESOURCE_PATTERN, SECRET_PATTERN, LLMTrainJobSpec
from llmtrain_api.spec_metrics import PROJECT_PATTERN
from llmtrain_api.structural import PRESERVE, Schema, nodes, with_defaults, without_nulls
from llmtrain_api.uris import FOLDER_PATTERN, SOURCE_PATTERN, STORE_PATTERN

_METADATA_FIELDS = (
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
)
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
MAX_NAMES_SHOWN = 14
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_ALLOWED = "a-z, 0-9 and '-', at most 63 characters, a letter or digit at both ends"
_NAME_ALLOWED = f"a-z, 0-9 and '-', at most {c.MAX_NAME_LENGTH} characters, a letter or digit at both ends"

_PATHS = "pvc://CLAIM/PATH or file:///PATH"
PATTERN_WORDS = {
    IMAGE_PATTERN: "without spaces",
    FOLDER_PATTERN: f"{_PATHS}, without spaces; CLAIM: a-z, 0-9, '-' and '.'",
    STORE_PATTERN: (
        "pvc://CLAIM/PATH, file:///PATH or s3://BUCKET/PATH, without spaces; CLAIM and BUCKET: a-z, 0-9, '-' and '.'"
    ),
    SOURCE_PATTERN: f"{_PATHS}, without spaces, or builtin://python-stdlib; CLAIM: a-z, 0-9, '-' and '.'",
    DISK_PATTERN: "a path from the root, /PATH, without spaces",
    SECRET_PATTERN: "the name of a Secret: a-z, 0-9, '-' and '.'",
    PROJECT_PATTERN: "without spaces and / \\ # ? % :",
    RESOURCE_PATTERN: "DOMAIN/NAME, for instance nvidia.com/gpu, without spaces",
}
"""What each pattern of a field means."""


@dataclass(frozen=True)
class FieldProblem:
    """One mistake."""

    path: str
    """As kubectl writes it: spec.data.sources[0].uri."""
    value: Any
    """What is written there; None where nothing is."""
    allowed: str
    fix: str
    message: str
    """What is wrong, with the value; without allowed and fix."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}; allowed: {self.allowed}; fix: {self.fix}"


def validate(manifest: Any, old: dict[str, Any] | None = None) -> list[FieldProblem]:
    """Return every mistake of a manifest, in the order of its fields; none: an API server accepts it.

    Args:
        manifest: what the user wrote, as plain data.
        old: the object that this one replaces, for the rules about what may not change.
    """
    if not isinstance(manifest, dict):
        return [_wrong("manifest", manifest, "a mapping", "begin with apiVersion, kind, metadata and spec")]
    problems = [*_header(manifest), *_metadata(manifest.get("metadata"))]
    schema = job_schema()["properties"]["spec"]
    spec = manifest.get("spec")
    if not isinstance(spec, dict):
        return [*problems, _not_a_mapping("spec", spec)]
    clean = without_nulls(schema, spec)
    problems += [*_unknown_fields(schema, clean, "spec"), *_types(schema, clean), *_repeated(schema, clean, "spec")]
    wrong = {problem.path for problem in problems}
    return problems + list(_broken_rules({**manifest, "spec": clean}, old, wrong))


def rule_problems(manifest: dict[str, Any]) -> list[FieldProblem]:
    """Return the rules that a manifest of sound types breaks: what an object may have that an older CRD let pass."""
    return list(_broken_rules(manifest, None, set()))


# --- beside the spec -------------------------------------------------------------------------------------------------


def _header(manifest: dict[str, Any]) -> Iterator[FieldProblem]:
    for name, expected in (("apiVersion", c.API_VERSION), ("kind", c.KIND)):
        if manifest.get(name) != expected:
            yield _wrong(name, manifest.get(name), expected, f"write {name}: {expected}")
    known = ("apiVersion", "kind", "metadata", "spec", "status")
    for name in manifest:
        if name not in known:
            yield _unknown(str(name), str(name), known)


def _metadata(metadata: Any) -> Iterator[FieldProblem]:
    if not isinstance(metadata, dict):
        yield _not_a_mapping("metadata", metadata)
        return
    for name in metadata:
        if name not in _METADATA_FIELDS:
            yield _unknown(f"metadata.{name}", str(name), _METADATA_FIELDS)
    name = metadata.get("name")
    if name is None and isinstance(metadata.get("generateName"), str):
        return
    if not isinstance(name, str) or not _SUBDOMAIN.fullmatch(name):
        yield _wrong("metadata.name", name, _NAME_ALLOWED, "name the job")
    namespace = metadata.get("namespace")
    if namespace is not None and not (isinstance(namespace, str) and _LABEL.fullmatch(namespace)):
        yield _wrong("metadata.namespace", namespace, _LABEL_ALLOWED, "name a namespace, or leave it out")


# --- types -----------------------------------------------------------------------------------------------------------


def _unknown_fields(schema: Schema, value: Any, at: str) -> Iterator[FieldProblem]:
    """What the schema does not name, with the nearest name that it does; such a field would do nothing."""
    if isinstance(value, dict) and "properties" in schema:
        for name, child in value.items():
            if name in schema["properties"]:
                yield from _unknown_fields(schema["properties"][name], child, f"{at}.{name}")
            elif not schema.get(PRESERVE):
                yield _unknown(f"{at}.{name}", str(name), tuple(schema["properties"]))
    if isinstance(value, list) and "items" in schema:
        for index, child in enumerate(value):
            yield from _unknown_fields(schema["items"], child, f"{at}[{index}]")


def _types(schema: Schema, spec: dict[str, Any]) -> Iterator[FieldProblem]:
    """Wrong types and bounds. Strict as an API server: no number in quotes, no Python spelling of a name."""
    try:
        LLMTrainJobSpec.model_validate(spec, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            if entry["type"] == "extra_forbidden":
                continue
            path, node = _locate(schema, entry["loc"])
            if entry["type"] == "missing":
                yield FieldProblem(path, None, _allowed(node), f"add {path}", "is missing")
            else:
                allowed = _allowed(node, entry.get("ctx", {}).get("le"))
                yield _wrong(path, entry["input"], allowed, _fix(node, entry["input"]))


def _allowed(node: Schema, limit: float | None = None) -> str:
    """What the field may be, in words that hold the very rule: a pattern as what it means, and a minimal length.

    Args:
        limit: the upper bound that refused a value; the schema lacks that of int64.
    """
    words = describe(node)
    if node.get("type") == "string" and "enum" not in node and ("pattern" in node or "minLength" in node):
        form = PATTERN_WORDS.get(node.get("pattern", ""), "")
        return f"a string of {node.get('minLength', 0)} to {node['maxLength']} characters{form and ', '}{form}"
    return words if limit is None or "maximum" in node else f"{words}, at most {limit}"


def _fix(node: Schema, value: Any) -> str:
    if isinstance(value, str) and "pattern" in node and re.search(r"\s", value):
        return "write it without spaces"
    return fix_for(node, value)


def _locate(schema: Schema, location: tuple[int | str, ...]) -> tuple[str, Schema]:
    """Return the path of pydantic's location, and the schema there."""
    path, node = "spec", schema
    for step in location:
        if isinstance(step, int):
            path, node = f"{path}[{step}]", node.get("items", {})
        else:
            path, node = f"{path}.{step}", node.get("properties", {}).get(step, {})
    return path, node


def _repeated(schema: Schema, value: Any, at: str) -> Iterator[FieldProblem]:
    """Items of a list that is a map by some key, with a key that came before."""
    if isinstance(value, dict):
        for name, child in schema.get("properties", {}).items():
            yield from _repeated(child, value.get(name), f"{at}.{name}")
    keys = schema.get("x-kubernetes-list-map-keys")
    if isinstance(value, list) and keys:
        seen: list[list[Any]] = []
        for index, item in enumerate(value):
            key = [item.get(name) for name in keys] if isinstance(item, dict) else [item]
            if key in seen:
                where = f"{at}[{index}].{keys[0]}"
                yield _wrong(where, key[0], f"each {keys[0]} once", "leave this one out")
            seen.append(key)


# --- rules -----------------------------------------------------------------------------------------------------------


def _broken_rules(manifest: dict[str, Any], old: dict[str, Any] | None, wrong: set[str]) -> Iterator[FieldProblem]:
    now = complete(manifest)
    before = complete(old) if old else None
    for rule in RULES:
        if rule.transition and before is None:
            continue
        for path, scope in scopes(rule, now, before):
            if not _readable(rule, path, scope, wrong) or rule.holds(scope):
                continue
            field = f"{path}.{rule.field}".strip(".") if rule.field else path
            value = _at(scope.now, rule.field)
            yield FieldProblem(
                field, value, rule.allowed_for(scope), rule.fix_for(scope), f"{rule.value.as_text(scope)} is refused"
            )


def complete(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest as an API server would store it: nulls dropped, defaults filled in."""
    schema = job_schema()["properties"]["spec"]
    return {**manifest, "spec": with_defaults(schema, without_nulls(schema, manifest.get("spec")))}


def scopes(rule: Rule, now: Any, before: Any) -> list[tuple[str, Scope]]:
    """Return the nodes that a rule is about, each with its path; [] in rule.at stands for every item."""
    found = [("", Scope(now, before))]
    for step in rule.at.split(".") if rule.at else ():
        name, items = step.removesuffix("[]"), step.endswith("[]")
        below = []
        for path, scope in found:
            child = _at(scope.now, name)
            place = f"{path}.{name}".strip(".")
            if items:
                listed = child if isinstance(child, list) else []
                below += [(f"{place}[{index}]", Scope(item)) for index, item in enumerate(listed)]
            elif child is not None:
                below.append((place, Scope(child, _at(scope.before, name))))
        found = below
    return [(path, scope) for path, scope in found if not rule.transition or scope.before is not None]


def _readable(rule: Rule, path: str, scope: Scope, wrong: set[str]) -> bool:
    """False where a field that the rule reads is wrong already: it would only say the same again, or stumble."""
    for field in rule.reads:
        full = f"{path}.{field}".strip(".") if field else path
        if any(full == bad or full.startswith((f"{bad}.", f"{bad}[")) for bad in wrong):
            return False
        if field == "metadata.name" and _at(scope.now, field) is None:
            return False
        if not field and any(bad.startswith((f"{path}.", f"{path}[")) for bad in wrong):
            return False
    return True


def _at(value: Any, path: str) -> Any:
    for step in path.split(".") if path else ():
        value = value.get(step) if isinstance(value, dict) else None
    return value


# --- building problems -----------------------------------------------------------------------------------------------


def _wrong(path: str, value: Any, allowed: str, fix: str) -> FieldProblem:
    said = "is missing" if value is None else f"{shorten(value)} is refused"
    return FieldProblem(path, value, allowed, fix, said)


def _not_a_mapping(path: str, value: Any) -> FieldProblem:
    return _wrong(path, value, "a mapping", f"write {path}: with fields below it")


def _unknown(path: str, name: str, known: tuple[str, ...]) -> FieldProblem:
    guess = did_you_mean(name, known) or _elsewhere(name)
    fix = f"did you mean {guess}?" if guess else "remove it"
    allowed = ", ".join(known[:MAX_NAMES_SHOWN]) + (" and others" if len(known) > MAX_NAMES_SHOWN else "")
    return FieldProblem(path, name, allowed, fix, "is no field of this resource")


def _elsewhere(name: str) -> str:
    """A field of that very name at another place of the spec."""
    spec = job_schema()["properties"]["spec"]
    paths = [path for path, _ in nodes(spec, "spec") if not path.endswith("]") and ".template.spec." not in path]
    same = [path for path in paths if letters(path.rpartition(".")[2]) == letters(name)]
    return same[0] if same else ""
