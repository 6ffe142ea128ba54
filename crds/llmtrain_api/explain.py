"""Words for people about schemas and values."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from llmtrain_api.structural import PRESERVE, Schema

MAX_SHOWN = 80
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")


def describe(node: Schema) -> str:
    """Return what a field may be: its type with its bounds."""
    if "enum" in node:
        return " or ".join(str(value) for value in node["enum"])
    kind: str = node.get("type", "any")
    if kind == "array":
        return f"a list of {node.get('minItems', 0)} to {node['maxItems']} items, each {describe(node['items'])}"
    if "additionalProperties" in node:
        return f"a map of at most {node['maxProperties']} entries, each {describe(node['additionalProperties'])}"
    if kind == "object":
        fields = ", ".join(node.get("properties", {}))
        return f"an object of {fields}" if fields and not node.get(PRESERVE) else "an object"
    if kind == "string":
        return _string(node)
    words = {"integer": "an integer", "number": "a number", "boolean": "true or false"}.get(kind, kind)
    return f"{words}{_bounds(node)}"


def _string(node: Schema) -> str:
    """A pattern says little to people; the field's own words say what it looks like."""
    length = f"a string of at most {node['maxLength']} characters"
    return f"{length} ({node['description'].partition('. ')[0].rstrip('.')})" if "pattern" in node else length


def _bounds(node: Schema) -> str:
    words = []
    if "minimum" in node:
        words.append(f"{'more than' if node.get('exclusiveMinimum') else 'at least'} {node['minimum']}")
    if "maximum" in node:
        words.append(f"{'less than' if node.get('exclusiveMaximum') else 'at most'} {node['maximum']}")
    return ", " + ", ".join(words) if words else ""


def fix_for(node: Schema, value: Any) -> str:
    """Return what to do about a wrong value."""
    if "enum" in node:
        guess = did_you_mean(str(value), [str(word) for word in node["enum"]])
        return f"did you mean {guess}?" if guess else "choose one of these"
    if isinstance(value, str) and node.get("type") in ("integer", "number") and _NUMBER.fullmatch(value):
        return "remove the quotes"
    if node.get("type") == "boolean":
        return "write true or false, without quotes"
    if node.get("type") == "string" and not isinstance(value, str):
        return "put it in quotes"
    return "change the value" if isinstance(value, int | float | str) else "write it as described"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the known word most like this one, or nothing; 'micro_batch_size' is like microBatchSize."""
    by_letters = {letters(word): word for word in known}
    close = difflib.get_close_matches(letters(name), by_letters, n=1, cutoff=0.7)
    return by_letters[close[0]] if close else ""


def letters(name: str) -> str:
    """Return a name without what spellings differ in: micro_batch_size, micro-batch-size, MicroBatchSize."""
    return re.sub(r"[-_. ]", "", name).lower()


def shorten(value: Any) -> str:
    """Return a value as JSON, at most MAX_SHOWN characters of it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
