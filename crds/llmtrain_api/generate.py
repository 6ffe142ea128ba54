"""Write every generated file, or with --check say which of them is not what the types and rules say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llmtrain_api import constants as c
from llmtrain_api.crdgen import chart_file, crd_file
from llmtrain_api.reference import reference_file

ROOT = Path(__file__).resolve().parents[2]


def generated_files() -> dict[str, str]:
    """Return path below the repository's root -> content."""
    return {
        f"crds/{c.GROUP}_{c.PLURAL}.yaml": crd_file(),
        "charts/llmtrain/templates/crd.yaml": chart_file(),
        "docs/reference/llmtrainjob.md": reference_file(),
    }


def drifted(root: Path) -> list[str]:
    """Return the generated files below root that are missing or differ."""
    return [
        name
        for name, content in generated_files().items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != content
    ]


def write(root: Path) -> list[str]:
    """Write the files that differ and return their names."""
    changed, contents = drifted(root), generated_files()
    for name in changed:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(contents[name], encoding="utf-8")
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m llmtrain_api.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a file has drifted")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    if options.check:
        names = drifted(options.root)
        for name in names:
            print(f"{name} is not what crds/llmtrain_api says: run `make generate` and commit it", file=sys.stderr)
        return 1 if names else 0
    for name in write(options.root):
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
