"""Manifests as the user gives them: read with a YAML 1.2 loader, validated as a whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from llmtrain_api.manifest_io import ManifestError, load_documents
from llmtrain_api.validation import FieldProblem, validate
from llmtrain_operator.cli.say import UsageError


def read(file: str) -> list[dict[str, Any]]:
    """Return the documents of a file; - is standard input.

    Raises:
        UsageError: it cannot be read or is no YAML; the message has the line.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    try:
        documents = load_documents(text, file)
    except ManifestError as error:
        raise UsageError(str(error)) from error
    if not documents:
        raise UsageError(f"{file}: holds no document; write one LLMTrainJob")
    return documents


def name_of(manifest: dict[str, Any]) -> str:
    """Return how a manifest calls itself, whatever state it is in."""
    metadata = manifest.get("metadata")
    named = metadata if isinstance(metadata, dict) else {}
    return str(named.get("name") or named.get("generateName") or "(no name)")


def describe(file: str, manifest: dict[str, Any], problems: list[FieldProblem]) -> str:
    """Return one line per problem: where, what it is, what is allowed, the fix."""
    lines = [f"{file}: {name_of(manifest)}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"]
    lines += [f"  {problem}" for problem in problems]
    return "\n".join(lines)


def read_one_valid(file: str) -> dict[str, Any]:
    """Return the one valid LLMTrainJob of a file.

    Raises:
        UsageError: there is not exactly one document, or it is not valid.
    """
    documents = read(file)
    if len(documents) > 1:
        raise UsageError(f"{file}: holds {len(documents)} documents; run one job at a time")
    problems = validate(documents[0])
    if problems:
        raise UsageError(describe(file, documents[0], problems))
    if not documents[0]["metadata"].get("name"):
        raise UsageError(f"{file}: metadata.name is missing: a run on this machine needs it, to be found again")
    return documents[0]
