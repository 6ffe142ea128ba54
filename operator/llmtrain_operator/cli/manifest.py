"""Manifests as the user gives them: read with a YAML 1.2 loader, validated as a whole."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

from llmtrain_api.manifest_io import ManifestError, read_documents
from llmtrain_api.planning.decision import layout_problems
from llmtrain_api.validation import FieldProblem, validate
from llmtrain_operator.cli.say import UsageError

_FIXES = {
    errno.ENOENT: "give the path of a file that exists, or - for standard input",
    errno.EISDIR: "give the files in it",
    errno.EACCES: "make it readable (chmod u+r), or give another file",
}


def read(file: str) -> list[dict[str, Any] | ManifestError]:
    """Return the documents of a file, and in place of each that is of no use, why; - is standard input.

    Raises:
        UsageError: it cannot be read, or holds nothing.
    """
    documents = read_documents(_text(file), file)
    if not documents:
        raise UsageError(f"{file}: holds no document; write one LLMTrainJob")
    return documents


def _text(file: str) -> str:
    try:
        return _standard_input() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at {error.start}"
        raise UsageError(f"{file}: is no UTF-8 text ({found}); save it as UTF-8") from error
    except OSError as error:
        fix = _FIXES.get(error.errno or 0, "give a file that you can read, or - for standard input")
        raise UsageError(f"{file}: {error.strerror}; {fix}") from error


def _standard_input() -> str:
    if sys.stdin is None:
        raise UsageError("-: standard input is closed; pipe a manifest into it, or give a file")
    binary = getattr(sys.stdin, "buffer", None)  # manifests are UTF-8 wherever they come from
    return binary.read().decode() if binary else sys.stdin.read()


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
    """Return the one valid LLMTrainJob of a file, which has a name and a layout.

    Raises:
        UsageError: there is not exactly one document, it is not valid, it has no name of its own, or the planner, which
            is to choose its layout, finds none.
    """
    document = read_one(file)
    if problems := layout_problems(document):
        raise UsageError(describe(file, document, problems))
    if not document["metadata"].get("name"):
        raise UsageError(f"{file}: metadata.name is missing: a run on this machine needs it, to be found again")
    return document


def read_one(file: str) -> dict[str, Any]:
    """Return the one valid LLMTrainJob of a file. Whether the planner finds a layout for it is not asked.

    Raises:
        UsageError: there is not exactly one document, or it is not valid.
    """
    documents = []
    for found in read(file):
        if isinstance(found, ManifestError):
            raise UsageError(str(found))
        documents.append(found)
    if len(documents) > 1:
        raise UsageError(f"{file}: holds {len(documents)} documents; give one job at a time")
    [document] = documents
    problems = validate(document)
    if problems:
        raise UsageError(describe(file, document, problems))
    return document
