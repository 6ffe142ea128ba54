"""`llmtrain validate`: every error of every manifest at once."""

from __future__ import annotations

import argparse

from llmtrain_api.validation import validate
from llmtrain_operator.cli import manifest


def command(options: argparse.Namespace) -> int:
    """Return 0 where every document is a valid LLMTrainJob, else 1."""
    bad = 0
    for file in options.files:
        for document in manifest.read(file):
            problems = validate(document)
            if problems:
                bad += 1
                print(manifest.describe(file, document, problems))
            else:
                print(f"{file}: {document['metadata']['name']}: valid")
    return 1 if bad else 0
