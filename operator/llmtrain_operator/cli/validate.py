"""`llmtrain validate`: every error of every manifest at once."""

from __future__ import annotations

import argparse

from llmtrain_api.manifest_io import ManifestError
from llmtrain_api.planning.decision import layout_problems
from llmtrain_api.validation import validate
from llmtrain_operator.cli import manifest
from llmtrain_operator.cli.say import UsageError, complain

INVALID = 1
UNREADABLE = 2


def command(options: argparse.Namespace) -> int:
    """Return 0 where every document is a valid LLMTrainJob, 1 where one is not, 2 where a file cannot be read."""
    return max(_check(file) for file in options.files)


def _check(file: str) -> int:
    try:
        documents = manifest.read(file)
    except UsageError as error:
        complain(str(error))
        return UNREADABLE
    code = 0
    for number, document in enumerate(documents, 1):
        if isinstance(document, ManifestError):
            code = UNREADABLE
            complain(str(document))
            continue
        place = file if len(documents) == 1 else f"{file} (document {number})"
        problems = validate(document) or layout_problems(document)
        if problems:
            code = max(code, INVALID)
            print(manifest.describe(place, document, problems))
        else:
            print(f"{place}: {manifest.name_of(document)}: valid")
    return code
