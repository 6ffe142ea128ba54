"""A bucket: parameters whose gradients travel in one message, packed so that each rank's share of it is consecutive.

Of every parameter a rank owns a box of rows, as under FSDP2's Shard(0): so first values, norms and checkpoints need not
know which of the two it is. The buffer lies [rank][box of each parameter], padded where rows do not divide evenly.

Shape suffixes: N  ranks that share the rows     S  elements of a rank's share
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain_trainer.parallel.collectives import start_gather, start_scatter_sum
from llmtrain_trainer.parallel.pieces import Box

BUCKET_BYTES = 25 << 20
"""Of fp32 gradients. DDP's choice: large enough for the bandwidth, small enough to begin before backward ends."""


@dataclass(frozen=True)
class Groups:
    """Who sums a bucket's gradients. None where that is one rank."""

    shards: dist.ProcessGroup | None
    """Ranks that share the rows."""
    copies: dist.ProcessGroup | None
    """Ranks that own the same rows."""
    copy_count: int

    @property
    def ranks(self) -> int:
        return self.shards.size() if self.shards else 1

    @property
    def rank(self) -> int:
        return self.shards.rank() if self.shards else 0

    @property
    def busy(self) -> bool:
        """Whether anything has to be sent."""
        return self.shards is not None or self.copies is not None


@dataclass
class Slot:
    """The place of one parameter in a bucket. It is cut along `dim` into runs of `run` rows, one per rank."""

    name: str
    parameter: nn.Parameter
    dim: int
    run: int
    full: int
    """Ranks whose run is complete; the rank after them has the rest, and those after that nothing."""
    box: Box
    offset: int = 0
    """In each rank's share."""

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, groups: Groups) -> Slot:
        """Cut stacked experts by expert, unless some ranks would get more of them than others: then by their rows."""
        shape, ranks = tuple(parameter.shape), groups.ranks
        dim = 1 if len(shape) == 3 and shape[0] % ranks and not shape[1] % ranks else 0
        run = -(-shape[dim] // ranks)
        first = min(groups.rank * run, shape[dim])
        count = min(run, shape[dim] - first)
        box = Box(
            shape,
            offsets=tuple(first if d == dim else 0 for d in range(len(shape))),
            sizes=tuple(count if d == dim else n for d, n in enumerate(shape)),
            copies=groups.copy_count,
        )
        return cls(name, parameter, dim, run, shape[dim] // run, box)

    @property
    def elements(self) -> int:
        """Of a complete run."""
        return self.run * (self.parameter.numel() // self.parameter.shape[self.dim])

    def own(self, share_S: Tensor) -> Tensor:
        """Return this rank's box in its share, as a view."""
        sizes = self.box.sizes
        return share_S[self.offset : self.offset + torch.Size(sizes).numel()].view(sizes)

    def runs(self, whole: Tensor) -> list[Tensor]:
        """Return views of a tensor of the parameter's shape: the complete runs, stacked, and what is left."""
        complete = self.full * self.run
        head = whole.narrow(self.dim, 0, complete).unflatten(self.dim, (self.full, self.run)).movedim(self.dim, 0)
        left = whole.shape[self.dim] - complete
        return [head, whole.narrow(self.dim, complete, left)] if left else [head]

    def places(self, buffer_NS: Tensor) -> list[Tensor]:
        """Return views of where `runs` belong in the buffer, in the same order and shapes."""
        shape = list(self.parameter.shape)
        left = shape[self.dim] - self.full * self.run
        shape[self.dim] = self.run
        head = buffer_NS[: self.full, self.offset : self.offset + self.elements].view(self.full, *shape)
        if not left:
            return [head]
        shape[self.dim] = left
        count = torch.Size(shape).numel()
        return [head, buffer_NS[self.full, self.offset : self.offset + count].view(shape)]


class Bucket:
    """Some parameters' masters, and their gradients on the way."""

    def __init__(self, slots: list[Slot], groups: Groups) -> None:
        self.slots, self.groups = slots, groups
        self.missing = len(slots)
        """Gradients that the next reduction still waits for."""
        self._share = 0
        for slot in slots:
            slot.offset = self._share
            self._share += slot.elements
        first = slots[0].parameter
        self.masters = torch.empty(self._share, dtype=torch.float32, device=first.device)
        self._aliased = groups.shards is None and first.dtype == torch.float32
        if self._aliased:  # whole, and in the type in which it is computed: one copy serves both
            for slot in slots:
                slot.parameter.data = slot.own(self.masters)
        self._gradient: Tensor | None = None
        self._pending: Callable[[], Tensor] | None = None

    @property
    def gradient(self) -> Tensor:
        """This rank's share [S] of the summed gradient, fp32."""
        assert self._gradient is not None
        return self._gradient

    def reduce(self) -> None:
        """Begin to sum what the parameters have as gradients over all data ranks, and take it from them.

        Over copies of a shard only `sum_copies` sums, once a step, when all has been added up.
        """
        self.settle()
        whole_NS = self._pack()
        if self.groups.shards is not None:
            self._pending = start_scatter_sum(whole_NS, self.groups.shards)
            return
        work = dist.all_reduce(whole_NS, group=self.groups.copies, async_op=True) if self.groups.copies else None

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return whole_NS.view(-1)

        self._pending = wait

    def settle(self) -> None:
        """Wait for the sum that is on its way, and add it to the step's gradient."""
        if self._pending is None:
            return
        arrived, self._pending = self._pending(), None
        self._gradient = arrived if self._gradient is None else self._gradient.add_(arrived)

    def sum_copies(self) -> Callable[[], object]:
        """Begin to sum this share over the ranks that own the same; return what waits for it."""
        if self.groups.shards is None or self.groups.copies is None:
            return lambda: None
        work = dist.all_reduce(self.gradient, group=self.groups.copies, async_op=True)
        assert work is not None
        return work.wait

    def forget(self) -> None:
        self._gradient = None

    def publish(self) -> Callable[[], None]:
        """Begin to make parameters of everybody's masters; return what ends it."""
        if self._aliased:
            return lambda: None
        own_S = self.masters.to(self.slots[0].parameter.dtype)
        if self.groups.shards is None:
            self._unpack(own_S.unsqueeze(0))
            return lambda: None
        wait = start_gather(own_S, self.groups.shards)
        return lambda: self._unpack(wait())

    @torch.no_grad()
    def _pack(self) -> Tensor:
        """Return the gradients as they are to be sent, fp32 [N, S], and let go of them."""
        whole_NS = self.masters.new_empty(self.groups.ranks, self._share)
        places: list[Tensor] = []
        runs: list[Tensor] = []
        for slot in self.slots:
            gradient, slot.parameter.grad = slot.parameter.grad, None
            if gradient is None:
                for place in slot.places(whole_NS):
                    place.zero_()
            else:
                places += slot.places(whole_NS)
                runs += slot.runs(gradient)
        if runs:
            torch._foreach_copy_(places, runs)
        return whole_NS

    @torch.no_grad()
    def _unpack(self, whole_NS: Tensor) -> None:
        runs = [run for slot in self.slots for run in slot.runs(slot.parameter)]
        torch._foreach_copy_(runs, [place for slot in self.slots for place in slot.places(whole_NS)])


def fill_buckets(slots: Iterable[tuple[Groups, Slot]]) -> list[Bucket]:
    """Put slots into buckets in order: those of the same groups together, until a bucket is full."""
    open_ones: dict[int, tuple[Groups, list[Slot]]] = {}
    filled: list[Bucket] = []
    for groups, slot in slots:
        _, waiting = open_ones.setdefault(id(groups), (groups, []))
        waiting.append(slot)
        if sum(s.parameter.numel() for s in waiting) * 4 >= BUCKET_BYTES:
            filled.append(Bucket(waiting, groups))
            del open_ones[id(groups)]
    return filled + list(itertools.starmap(lambda groups, waiting: Bucket(waiting, groups), open_ones.values()))
