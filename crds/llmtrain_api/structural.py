"""From pydantic types to a structural schema, as Kubernetes asks of a CRD, and what an API server does with one.

Rules of structural schemas: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
PRESERVE = "x-kubernetes-preserve-unknown-fields"
_DROPPED = ("title", "discriminator", "$defs")


class SchemaError(ValueError):
    """A type that cannot be told to an API server; the message names the field."""


def structural_schema(model: type[BaseModel], at: str) -> Schema:
    """Return the structural schema of a model; `at` names it in errors, for instance `spec`.

    Raises:
        SchemaError: a union, or a list, string or map without an upper bound (CEL's cost could not be estimated).
    """
    whole = model.model_json_schema(by_alias=True)
    return _convert(whole, whole.get("$defs", {}), at)


def _convert(node: Schema, definitions: dict[str, Schema], at: str) -> Schema:
    node = _inline(node, definitions, at)
    out: Schema = {k: v for k, v in node.items() if k not in _DROPPED and k not in ("properties", "items")}
    if "description" in out:
        out["description"] = _one_line(out["description"])
    if "const" in out:
        out["enum"] = [out.pop("const")]
    _convert_exclusive(out)
    if out.get("type") == "integer":
        _convert_integer(out)
    _convert_additional(out, definitions, at)
    if "properties" in node:
        out["properties"] = {k: _convert(v, definitions, f"{at}.{k}") for k, v in node["properties"].items()}
    if "items" in node:
        out["items"] = _convert(node["items"], definitions, f"{at}[]")
    _require_bounds(out, at)
    return {k: out[k] for k in sorted(out, key=_reading_order)}


def _reading_order(key: str) -> tuple[int, str]:
    """What a reader asks first comes first."""
    order = ("description", "type", "format", "enum", "default", "required", "properties", "items")
    return (order.index(key) if key in order else 4, key)


def _inline(node: Schema, definitions: dict[str, Schema], at: str) -> Schema:
    """Replace references, and `X | None` by an optional X: an absent field is the only null that Kubernetes knows."""
    node = dict(node)
    while True:
        if "$ref" in node:
            target = definitions[node.pop("$ref").rsplit("/", 1)[-1]]
            node = {**target, **node}
        elif "anyOf" in node:
            members = [m for m in node.pop("anyOf") if m != {"type": "null"}]
            if len(members) != 1:
                raise SchemaError(f"{at}: a union is not structural; use optional fields and a rule")
            node = {**members[0], **node}
            if node.get("default", 0) is None:
                del node["default"]
        elif "oneOf" in node or "allOf" in node:
            raise SchemaError(f"{at}: oneOf and allOf are not structural; use optional fields and a rule")
        else:
            return node


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _convert_exclusive(out: Schema) -> None:
    """OpenAPI v3.0 has flags where JSON Schema has numbers."""
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in out:
            out[inclusive], out[exclusive] = out[exclusive], True


def _convert_integer(out: Schema) -> None:
    """Every integer has a width. The bounds of int64 are left out: they are no exact floats, as a schema needs them."""
    if out.setdefault("format", "int32") == "int64":
        for name, bound in (("minimum", -(2**63)), ("maximum", 2**63 - 1)):
            if out.get(name) == bound:
                del out[name]


def _convert_additional(out: Schema, definitions: dict[str, Schema], at: str) -> None:
    additional = out.pop("additionalProperties", None)
    if isinstance(additional, dict):
        out["additionalProperties"] = _convert(additional, definitions, f"{at}.*")
    elif additional is True:
        out[PRESERVE] = True


def _require_bounds(out: Schema, at: str) -> None:
    kind = out.get("type")
    if kind is None and not out.get(PRESERVE):
        raise SchemaError(f"{at}: no type")
    bound = {"string": "maxLength", "array": "maxItems"}.get(kind or "")
    if "additionalProperties" in out:
        bound = "maxProperties"
    if bound and bound not in out and "enum" not in out:
        raise SchemaError(f"{at}: {kind} without {bound}")


def nodes(schema: Schema, at: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield (path, schema) of every field below, depth first: spec.workers, spec.workers.replicas, ... items as []."""
    for name, child in schema.get("properties", {}).items():
        path = f"{at}.{name}" if at else name
        yield path, child
        yield from nodes(child, path)
    for key, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        if key in schema:
            yield at + suffix, schema[key]
            yield from nodes(schema[key], at + suffix)


def drop_defaults(schema: Schema) -> None:
    """Take all defaults away: a status says what was observed, and an API server must not add to it."""
    for _, node in nodes(schema):
        node.pop("default", None)


def complete_object_defaults(schema: Schema) -> None:
    """Make the default of every object what the defaults of its fields give, in full.

    {} would mean the same to users, but an API server tests rules against a default as it is written.

    Raises:
        SchemaError: an object's default says something else than the defaults of its fields.
    """
    for path, node in nodes(schema):
        if "properties" in node and "default" in node:
            given = with_defaults(node, without_nulls(node, node["default"]))
            if given != with_defaults(node, {}):
                raise SchemaError(f"{path}: the default {given} is not what the fields' own defaults give")
            node["default"] = given


def without_nulls(schema: Schema, value: Any) -> Any:
    """Return the value as an API server reads it: a null is an absent field, and 8.0 is the integer 8.

    What lies where the schema says nothing (preserved unknown fields) is left alone.
    """
    kind = schema.get("type")
    if kind == "object" and isinstance(value, dict):
        known = schema.get("properties", {})
        other = schema.get("additionalProperties", {})
        return {k: without_nulls(known.get(k, other), v) for k, v in value.items() if v is not None or k not in known}
    if kind == "array" and isinstance(value, list):
        return [without_nulls(schema.get("items", {}), v) for v in value]
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def with_defaults(schema: Schema, value: Any) -> Any:
    """Return a copy of the value with every default of the schema filled in, as an API server does."""
    if isinstance(value, dict):
        out = dict(value)
        for name, child in schema.get("properties", {}).items():
            if name not in out and "default" in child:
                out[name] = copy.deepcopy(child["default"])
            if name in out:
                out[name] = with_defaults(child, out[name])
        if "additionalProperties" in schema:
            out = {k: with_defaults(schema["additionalProperties"], v) for k, v in out.items()}
        return out
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], v) for v in value]
    return value
