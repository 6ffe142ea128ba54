"""`llmtrain validate`: every error of every manifest at once."""

from __future__ import annotations

import argparse
import sys

from llmtrain_api.validation import validate
from llmtrain_operator.cli import manifest
from llmtrain_operator.cli.say import UsageError

INVALID = 1
UNREADABLE = 2


def command(options: argparse.Namespace) -> int:
    """Return 0 where every document is a valid LLMTrainJob, 1 where one is not, 2 where a file cannot be read."""
    return max(_check(file) for file in options.files)


def _check(file: str) -> int:
    try:
        documents = manifest.read(file)
    except UsageError as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    code = 0
    for number, document in enumerate(documents, 1):
        place = file if len(documents) == 1 else f"{file} (document {number})"
        problems = validate(document)
        if problems:
            code = INVALID
            print(manifest.describe(place, document, problems))
        else:
            print(f"{place}: {manifest.name_of(document)}: valid")
    return code
