"""From text to token numbers: bytes, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import UserError

if TYPE_CHECKING:
    import tokenizers

END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
"""How well-known tokenizers call the end of a document, the most telling first."""
BYTES_END = 256
FIELD = "data.tokenizer.uri"


class Tokenizer(Protocol):
    vocab_size: int
    fingerprint: str
    """Differs whenever the same text would give other tokens."""
    end: int | None
    """The mark that ends each document; None where there is none."""

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the document's tokens, the end-of-document mark last."""
        ...


class ByteTokenizer:
    """256 byte values and one end-of-document mark."""

    vocab_size = 257
    fingerprint = "bytes-1"
    end: int | None = BYTES_END

    def encode(self, text: str) -> NDArray[np.uint32]:
        raw = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        return np.append(raw.astype(np.uint32), np.uint32(BYTES_END))


class JsonTokenizer:
    """A tokenizer.json as the `tokenizers` library reads it; the end mark is one of END_NAMES where it has one."""

    def __init__(self, inner: tokenizers.Tokenizer, fingerprint: str) -> None:
        # A file may ask for both: every document would be cut, or filled up, to a model's input length.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        # Not the number of tokens: ids may have gaps, and the embedding needs a row for the highest.
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        ids = (inner.token_to_id(name) for name in END_NAMES)
        self.end: int | None = next((i for i in ids if i is not None), None)
        self.fingerprint = fingerprint

    def encode(self, text: str) -> NDArray[np.uint32]:
        ids = self._inner.encode(text, add_special_tokens=False).ids
        return np.asarray(ids if self.end is None else [*ids, self.end], dtype=np.uint32)


def open_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of data.tokenizer.

    Raises:
        UserError: the file is not there or no tokenizer, or the model's vocabulary is smaller than the tokenizer's.
    """
    uri = config.spec.data.tokenizer.uri
    tokenizer: Tokenizer = ByteTokenizer() if uri is None else _from_file(config.local_path(FIELD, uri), uri)
    if tokenizer.vocab_size > config.dimensions.vocab_size:
        raise UserError(
            "model.vocabSize",
            config.dimensions.vocab_size,
            f"the tokenizer ({uri or 'bytes'}) makes {tokenizer.vocab_size} different tokens",
            allowed=f"at least {tokenizer.vocab_size}",
            fix=f"set model.vocabSize to {-(-tokenizer.vocab_size // 64) * 64}, or choose another data.tokenizer",
        )
    return tokenizer


def _from_file(path: Path, uri: str) -> JsonTokenizer:
    import tokenizers  # only here: a byte-level job should not pay for it at start

    try:
        text = path.read_text(encoding="utf-8")
        return JsonTokenizer(tokenizers.Tokenizer.from_str(text), hashlib.sha256(text.encode()).hexdigest())
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        problem, allowed = f"{path} is no tokenizer: {error}", "a Hugging Face tokenizer.json"
        raise UserError(FIELD, uri, problem, allowed=allowed, fix="correct the address") from error
