"""Reading users' files: YAML 1.2, where `6e-5` is a number as it is to kubectl (PyYAML reads it as a string)."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

MAX_DEPTH = 100
"""Levels below a document. No field lies deeper than 20, and what walks a manifest recursively must get to its end."""
MAX_VALUES = 200_000
"""Values of a document, each alias counted with all that it stands for: a few lines of aliases can mean billions."""
_TEXT = "tag:yaml.org,2002:str"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MERGE = "tag:yaml.org,2002:merge"
_TOO_DEEP = f"nested too deep; allowed: at most {MAX_DEPTH} levels; fix: look for brackets or '- ' too many"
_TOO_LARGE = f"holds too many values; allowed: at most {MAX_VALUES}; fix: use fewer aliases (*name)"

_TOO_MANY_DIGITS = "a number has too many digits; allowed: 64 bits; fix: shorten it, or put it in quotes"


class ManifestError(ValueError):
    """The text is no usable YAML; the message has the file, the line and the fix."""


class _Refused(ConstructorError):
    """It is YAML, but not what a manifest may be; the problem says why, and the fix."""

    def __init__(self, problem: str, node: Node) -> None:
        super().__init__(None, None, problem, node.start_mark)


class _Constructor(SafeConstructor):
    """Plain data as kubectl makes it: keys are texts, a date is one too, and what cannot be read has its line."""

    def construct_document(self, node: Any) -> Any:
        _prepare(node)
        return super().construct_document(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # 0x... has no limit of its own, and an error message could not show it
        except ValueError as error:
            if "digits" in str(error):
                raise _Refused(_TOO_MANY_DIGITS, node) from error
            raise ConstructorError(None, None, str(error), node.start_mark) from error
        return value


_Constructor.add_constructor(_TIMESTAMP, SafeConstructor.construct_yaml_str)


def read_documents(text: str, source: str) -> list[dict[str, Any] | ManifestError]:
    """Return the documents of a YAML or JSON text, and in place of each that is of no use, why; `source` names it.

    Empty documents are left out. Behind a text that is no YAML nothing can be read: its error comes last.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    found: list[dict[str, Any] | ManifestError] = []
    try:
        for document in yaml.load_all(text):
            if isinstance(document, dict):
                found.append(document)
            elif document is not None:
                found.append(_no_mapping(source, len(found) + 1, document))
    except (YAMLError, ValueError, RecursionError) as error:
        found.append(_unreadable(source, error))
    return found


def load_documents(text: str, source: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML or JSON text; empty ones are left out. `source` names it in errors.

    Raises:
        ManifestError: no YAML, a key written twice, or a document that is not a mapping.
    """
    documents = []
    for document in read_documents(text, source):
        if isinstance(document, ManifestError):
            raise document
        documents.append(document)
    return documents


def _prepare(root: Node) -> None:
    """Make every key a text, and refuse what is too deep or too large to be walked. Not recursive itself."""
    waiting, values = [(root, 0)], 0
    while waiting:
        node, depth = waiting.pop()
        values += 1
        if depth > MAX_DEPTH or values > MAX_VALUES:
            raise _Refused(_TOO_DEEP if depth > MAX_DEPTH else _TOO_LARGE, node)
        if isinstance(node, MappingNode):
            for key, value in node.value:
                _make_text(key)
                waiting.append((value, depth + 1))
        elif isinstance(node, CollectionNode):
            waiting += [(item, depth + 1) for item in node.value]


def _make_text(key: Node) -> None:
    if not isinstance(key, ScalarNode):
        raise _Refused("a key is a list or a mapping; allowed: a text; fix: write a name before the colon", key)
    if key.tag != _MERGE:
        key.tag = _TEXT


def _no_mapping(source: str, number: int, document: Any) -> ManifestError:
    return ManifestError(
        f"{source}: document {number} is a {_kind(document)}, not a mapping; "
        "fix: begin with apiVersion, kind, metadata and spec"
    )


def _unreadable(source: str, error: Exception) -> ManifestError:
    if isinstance(error, RecursionError):
        return ManifestError(f"{source}: {_TOO_DEEP}")
    if isinstance(error, DuplicateKeyError):
        return ManifestError(f"{_place(source, error)}: {_first_line(error)}; fix: keep one of the two")
    if isinstance(error, _Refused):
        return ManifestError(f"{_place(source, error)}: {error.problem}")
    if isinstance(error, MarkedYAMLError):
        return ManifestError(f"{_place(source, error)}: no valid YAML: {error.problem or error.context}")
    return ManifestError(f"{source}: no valid YAML: {' '.join(str(error).split())}")


def _place(source: str, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{source}: line {mark.line + 1}" if mark else source


def _first_line(error: DuplicateKeyError) -> str:
    return str(error.problem).splitlines()[0]


def _kind(value: Any) -> str:
    return {list: "list", str: "text", int: "number", float: "number", bool: "truth value"}.get(type(value), "value")
