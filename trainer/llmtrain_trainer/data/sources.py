"""Where text comes from: folders, files, globs, JSON lines, and the Python standard library that every machine has."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain_api.uris import Uri
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import UserError

TEXT_SUFFIXES = frozenset(".txt .md .rst .py .html .tex .csv .c .h .cpp .go .rs .js .ts".split())
JSON_LINES = ".jsonl"
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "__pycache__"}
)
ALLOWED = "a folder, a file or a glob with at least one text file (.txt .md .py ..., or .jsonl with a field text)"


@dataclass(frozen=True)
class Source:
    """One entry of data.sources with the files it stands for, in a fixed order."""

    field: str
    uri: str
    root: Path
    files: tuple[Path, ...]
    undecodable: Literal["strict", "replace"] = "strict"

    def documents(self) -> Iterator[str]:
        """Yield the text of each document, in order.

        Raises:
            UserError: a file cannot be read, is not UTF-8, or a JSON line has no text.
        """
        for file in self.files:
            try:
                if file.suffix == JSON_LINES:
                    yield from self._json_lines(file)
                else:
                    yield file.read_text(encoding="utf-8", errors=self.undecodable)
            except (OSError, UnicodeDecodeError) as error:
                raise self.wrong(f"{file} cannot be read: {error}", fix="make it readable UTF-8 text") from error

    def _json_lines(self, file: Path) -> Iterator[str]:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError) as error:
                    text = error
                if not isinstance(text, str):
                    problem = f"{file} line {number} is no JSON object with a string field 'text'"
                    raise self.wrong(problem, fix="correct the line")
                if not _is_unicode(text):
                    problem = f"{file} line {number} holds half of a surrogate pair, such as \\ud83d alone"
                    raise self.wrong(problem, fix="correct the escape in that line")
                yield text

    def wrong(self, problem: str, *, fix: str) -> UserError:
        return UserError(self.field, self.uri, problem, allowed=ALLOWED, fix=fix)


def _is_unicode(text: str) -> bool:
    """False where no UTF-8 can hold the text: JSON's escapes can say what Unicode does not have."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def open_sources(config: RunConfig) -> list[Source]:
    """Resolve data.sources to files; nothing is read yet.

    Raises:
        UserError: a source is not there, cannot be listed, or holds no text.
    """
    return [
        _open(f"data.sources[{index}].uri", source.uri, config) for index, source in enumerate(config.spec.data.sources)
    ]


def _open(field: str, uri: str, config: RunConfig) -> Source:
    if Uri.parse(uri).scheme == "builtin":
        return _standard_library(field, uri)
    path = config.local_path(field, uri)
    wrong = Source(field, uri, path, ()).wrong
    try:
        root, files = _files_at(path)
    except OSError as error:
        raise wrong(f"{path} cannot be listed: {error}", fix="correct the address or the permissions") from error
    if root is None:
        raise wrong(f"there is nothing at {path}", fix="correct the address, or mount the volume that holds the data")
    if not files:
        raise wrong(f"{path} holds no text file", fix="point to a folder with text files")
    return Source(field, uri, root, tuple(files))


def _files_at(path: Path) -> tuple[Path | None, list[Path]]:
    """Return the folder that names are relative to and the text files; no folder when nothing is there."""
    if path.is_dir():
        next(path.iterdir(), None)  # a folder that may not be listed would look empty to rglob
        return path, sorted(f for f in path.rglob("*") if f.is_file() and _is_text(f) and not _hidden(f, path))
    if path.is_file():
        return path.parent, [path]
    parts = path.parts
    first = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    if first is None:
        return None, []
    root = Path(*parts[:first])
    if not root.is_dir():
        return None, []
    return root, sorted(f for f in root.glob(str(Path(*parts[first:]))) if f.is_file())


def _is_text(file: Path) -> bool:
    return file.suffix in TEXT_SUFFIXES or file.suffix == JSON_LINES


def _hidden(file: Path, root: Path) -> bool:
    """True for what lies under a dotted name: .git and, in mounted ConfigMaps, the doubles under ..data ."""
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _standard_library(field: str, uri: str) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in STDLIB_LEFT_OUT]  # in place: keeps walk out of them
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    # A few of Python's own sources declare another encoding; their odd bytes become replacement marks.
    return Source(field, uri, root, tuple(sorted(files)), undecodable="replace")
