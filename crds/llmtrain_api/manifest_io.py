"""Reading users' files: YAML 1.2, where `6e-5` is a number as it is to kubectl (PyYAML reads it as a string)."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError


class ManifestError(ValueError):
    """The text is no usable YAML; the message has the file, the line and the fix."""


def load_documents(text: str, source: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML or JSON text; empty ones are left out. `source` names it in errors.

    Raises:
        ManifestError: no YAML, a key written twice, or a document that is not a mapping.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        documents = [document for document in yaml.load_all(text) if document is not None]
    except DuplicateKeyError as error:
        raise ManifestError(f"{_place(source, error)}: {_first_line(error)}; fix: keep one of the two") from error
    except MarkedYAMLError as error:
        raise ManifestError(f"{_place(source, error)}: no valid YAML: {error.problem or error.context}") from error
    except (YAMLError, ValueError) as error:
        raise ManifestError(f"{source}: no valid YAML: {error}") from error
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, dict):
            raise ManifestError(
                f"{source}: document {number} is a {_kind(document)}, not a mapping; "
                "fix: begin with apiVersion, kind, metadata and spec"
            )
    return documents


def _place(source: str, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{source}: line {mark.line + 1}" if mark else source


def _first_line(error: DuplicateKeyError) -> str:
    return str(error.problem).splitlines()[0]


def _kind(value: Any) -> str:
    return {list: "list", str: "text", int: "number", float: "number", bool: "truth value"}.get(type(value), "value")
