"""The batches of one rank: read lazily, in an order that no restart and no number of ranks can change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.data import cache as token_cache
from llmtrain_trainer.data.order import SampleOrder
from llmtrain_trainer.data.sources import open_sources
from llmtrain_trainer.data.tokenizer import END_NAMES, Tokenizer, open_tokenizer
from llmtrain_trainer.distributed import Ranks
from llmtrain_trainer.errors import PeerLostError, UserError

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of one optimizer step fall to data ranks and micro-batches."""

    global_batch: int
    micro_batch: int
    data_ranks: int

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.micro_batch * self.data_ranks)

    def samples(self, consumed: int, micro_batch: int, data_rank: int) -> range:
        """Return the sample numbers of one micro-batch of the step that starts after `consumed` samples.

        Whatever the number of ranks, a step takes the same samples: consumed .. consumed + global_batch.
        """
        start = consumed + (micro_batch * self.data_ranks + data_rank) * self.micro_batch
        return range(start, start + self.micro_batch)


class Loader:
    """Token sequences by sample number."""

    def __init__(self, tokens: NDArray[np.unsignedinteger], order: SampleOrder, sequence_length: int) -> None:
        self._tokens = tokens
        self._order = order
        self._length = sequence_length

    def batch(self, samples: range) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [len(samples), L]; the targets are the inputs moved by one."""
        rows = np.empty((len(samples), self._length + 1), dtype=np.int64)
        for row, sample in zip(rows, samples, strict=True):
            start = self._order.sequence(sample) * self._length
            row[:] = self._tokens[start : start + self._length + 1]
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def step(self, consumed: int, plan: BatchPlan, data_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches of one rank for one step."""
        for micro_batch in range(plan.micro_batches):
            yield self.batch(plan.samples(consumed, micro_batch, data_rank))


@dataclass(frozen=True)
class Data:
    loader: Loader
    fingerprint: str
    tokens: int
    document_end: int | None
    """The token that ends a document, if attention is to stay within documents."""


def open_data(config: RunConfig, ranks: Ranks) -> Data:
    """Tokenise (once per worker) and map the data, and make sure that all workers hold the same.

    Raises:
        UserError: data or tokenizer are not usable, or differ between workers.
        PeerLostError: the rank that tokenises for this worker did not finish.
    """
    tokenizer = open_tokenizer(config)
    end = document_end(config, tokenizer)
    sources = open_sources(config)
    folder = config.work_dir / "tokens"
    name = token_cache.cache_name(sources, tokenizer)
    cache = token_cache.find(folder, name)
    if cache is None:
        if config.launch.local_rank == 0:
            cache = token_cache.build(folder, name, sources, tokenizer)
        else:
            cache = _wait_for(folder, name, ranks)
    length = config.dimensions.sequence_length
    count = token_cache.sequences_in(cache, length, sources)
    _same_everywhere(cache.fingerprint, sources[0].uri, config, ranks)
    loader = Loader(cache.map(), SampleOrder(count, config.spec.training.seed), length)
    return Data(loader, cache.fingerprint, cache.tokens, end)


def document_end(config: RunConfig, tokenizer: Tokenizer) -> int | None:
    """Return the token that attention stops at, if it shall stop at one.

    Raises:
        UserError: it shall, and the tokenizer has none.
    """
    if not config.spec.data.mask_documents:
        return None
    if tokenizer.end is None:
        raise UserError(
            "data.maskDocuments",
            True,
            "the tokenizer marks no end of a document, so it cannot be seen where one ends",
            allowed=f"true with a tokenizer that has one of {', '.join(END_NAMES)}",
            fix="add such a token to the tokenizer, or leave maskDocuments out",
        )
    return tokenizer.end


def _wait_for(folder: Path, name: str, ranks: Ranks) -> token_cache.TokenCache:
    seconds = ranks.timeout.total_seconds()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if cache := token_cache.find(folder, name):
            return cache
        ranks.check()
        time.sleep(POLL_SECONDS)
    raise PeerLostError(f"local rank 0 did not tokenise the data within {seconds:.0f} s")


def _same_everywhere(fingerprint: str, uri: str, config: RunConfig, ranks: Ranks) -> None:
    if config.is_first:
        ranks.tell("data-fingerprint", fingerprint)
    elif (first := ranks.hear("data-fingerprint")) != fingerprint:
        raise UserError(
            "data.sources[0].uri",
            uri,
            f"worker {config.launch.node_rank} holds other data than worker 0 ({fingerprint[:9]} against {first[:9]})",
            allowed="the same files in every worker",
            fix="use a volume that all workers share, or copy the same files to every node",
        )
