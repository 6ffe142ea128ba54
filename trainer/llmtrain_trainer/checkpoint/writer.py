"""Writes the checkpoints of one tier in the background, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from llmtrain_trainer.checkpoint.outcome import Committed, Failed, Position

SAVE_TIMEOUT = timedelta(hours=1)
"""How long ranks wait for each other in a save: one may be stuck with a server that does not answer, or have more to
bring there. A dead one is noticed at once, since its sockets close; a silent one, by the collectives that train."""


class Tier(Protocol):
    """A place for checkpoints: the store that all workers share, or one that each worker has for itself."""

    def write(self, position: Position, snapshot: Mapping[str, Tensor], group: Any) -> Committed | Failed:
        """Write and commit one checkpoint; called on every rank at once. The outcome is the same on every rank.

        Raises:
            RuntimeError: another rank is gone.
        """
        ...


class Writer:
    """One rank's thread for one tier. Every rank calls the same methods at the same steps.

    The thread has a process group of its own: on the one that trains, or on that of another tier, its collectives would
    meet those of others and kill the process (gloo "collective mismatch"; KempnerForge issue 104).
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Committed | Failed] | None = None
        self.group: Any = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)

    @property
    def busy(self) -> bool:
        """A checkpoint is being written, or its outcome was not fetched yet."""
        return self._pending is not None

    @property
    def done(self) -> bool:
        """There is an outcome to fetch."""
        return self._pending is not None and self._pending.done()

    def start(self, position: Position, snapshot: Mapping[str, Tensor]) -> None:
        """Begin to write; the one before must have been waited for."""
        assert self._pending is None
        self._pending = self._thread.submit(self._tier.write, position, snapshot, self.group)

    def wait(self) -> Committed | Failed | None:
        """Return when nothing is being written any more: what became of it; None where nothing was on its way."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()


def from_first(value: Any, group: Any) -> Any:
    """Return rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def from_all(value: Any, group: Any) -> list[Any]:
    """Return the values of all ranks, in their order, on every rank."""
    box: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(box, value, group=group)
    return box
