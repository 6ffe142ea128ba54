"""All tokens of the data in one file, made once per worker and memory-mapped by its ranks."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmtrain_trainer.data.sources import Source
from llmtrain_trainer.data.tokenizer import Tokenizer
from llmtrain_trainer.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class TokenCache:
    """A finished cache: the flat tokens of all documents, one after the other."""

    path: Path
    tokens: int
    dtype: str
    fingerprint: str
    """SHA-256 of the tokens: equal on two workers exactly when they hold the same data."""

    def map(self) -> NDArray[np.unsignedinteger]:
        """Return the tokens [N], read from disk only where they are touched."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))


def cache_name(sources: list[Source], tokenizer: Tokenizer) -> str:
    """Return a name that changes with any file's name, size or time and with the tokenizer. Reads no content."""
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.fingerprint}".encode())
    for source in sources:
        digest.update(source.uri.encode())
        for file in source.files:
            stat = file.stat()
            name = os.fsencode(file.relative_to(source.root))  # a file's name need not be UTF-8
            digest.update(b"\0" + name + f"\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def find(folder: Path, name: str) -> TokenCache | None:
    """Return the cache called `name` when it is there and whole."""
    try:
        about = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        cache = TokenCache(folder / f"{name}.bin", about["tokens"], about["dtype"], about["fingerprint"])
        whole = cache.path.stat().st_size == cache.tokens * np.dtype(cache.dtype).itemsize
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return cache if whole else None


def build(folder: Path, name: str, sources: list[Source], tokenizer: Tokenizer) -> TokenCache:
    """Tokenise all documents into the cache called `name`; it appears whole or not at all.

    Memory used does not grow with the data.

    Raises:
        UserError: a source cannot be read or holds no text at all.
        OSError: the worker's own disk refuses the cache; the message names it.
    """
    try:
        return _build(folder, name, sources, tokenizer)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the tokens of the data cannot be kept in {folder}: {error.strerror or error}; fix: make room on the "
            "worker's disk (on a cluster its emptyDir /tmp, locally --state)",
        ) from error


def _build(folder: Path, name: str, sources: list[Source], tokenizer: Tokenizer) -> TokenCache:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"{name}.*.tmp"):  # of a rank that was killed; the folder is this worker's alone
        left_over.unlink(missing_ok=True)
    temporary = folder / f"{name}.{os.getpid()}.tmp"
    digest = hashlib.sha256()
    total = 0
    try:
        with temporary.open("wb") as out:
            for source in sources:
                before = total
                for text in source.documents():
                    if not text:
                        continue
                    raw = tokenizer.encode(text).astype(dtype).tobytes()
                    out.write(raw)
                    digest.update(raw)
                    total += len(raw) // np.dtype(dtype).itemsize
                if total == before:
                    raise source.wrong("all its files are empty", fix="point to files that hold text")
        cache = TokenCache(folder / f"{name}.bin", total, dtype, digest.hexdigest())
        os.replace(temporary, cache.path)
    finally:
        temporary.unlink(missing_ok=True)
    about = {k: v for k, v in asdict(cache).items() if k != "path"}
    temporary.write_text(json.dumps(about), encoding="utf-8")
    os.replace(temporary, folder / f"{name}.json")  # last: it is what makes the cache count
    return cache


def sequences_in(cache: TokenCache, sequence_length: int, sources: list[Source]) -> int:
    """Return how many whole sequences the data gives.

    Raises:
        UserError: not even one.
    """
    count = (cache.tokens - 1) // sequence_length
    if count < 1:
        raise UserError(
            sources[0].field,
            sources[0].uri,
            f"all sources together hold {cache.tokens} tokens, less than one sequence of {sequence_length} + 1",
            allowed=f"at least {sequence_length + 1} tokens",
            fix="add data, or lower model.sequenceLength",
        )
    return count
