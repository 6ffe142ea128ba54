"""Whole matrices for a rule that needs them, where every rank holds a part.

Each matrix that is cut has one owner among the ranks that hold a copy of the model together. All send him their parts,
he computes, and each gets its part of the outcome back: two exchanges, and no work is done twice. A matrix that its
holders have whole (an expert of its own rank, or all of them where nothing is sharded) stays where it is. Stacked
experts are as many matrices.

Source: Liu et al. 2025 (Moonlight, arXiv:2502.16982, section 2.3) gathers to all ranks and computes everywhere; owners
save that work, as in Ahn et al. 2025 (Dion, arXiv:2504.05295, appendix).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain_trainer.parallel.pieces import Piece

ROUND_ELEMENTS = 1 << 26
"""Per rank and exchange: what is whole at one time takes some hundred MB."""


class Unit(NamedTuple):
    """A matrix: a parameter, or one of those that a parameter stacks."""

    name: str
    number: int | None


@dataclass(frozen=True)
class Part:
    """A rectangle of a matrix that some ranks hold."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def of(self, matrix: Tensor) -> Tensor:
        return matrix[slice(*self.rows), slice(*self.columns)]


@dataclass(frozen=True)
class _Round:
    """One exchange there and one back, as this rank sees them. Lists are by rank; units have the order of all."""

    mine: list[Unit]
    """What this rank owns."""
    give: list[list[Unit]]
    """Own parts that go to each owner: of several ranks that hold a part, the first gives it."""
    take: list[list[Unit]]
    """Of what is mine, the parts that each rank gives."""
    give_back: list[list[Unit]]
    """Of what is mine, the parts that each rank holds."""
    take_back: list[list[Unit]]
    """Own parts that come back from each owner."""


class Wholes:
    """The matrices of a model, or a stage. Building it is a collective call over `group`."""

    def __init__(
        self, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Learn who holds what.

        Args:
            pieces: this rank's, of parameters of two dims, or of three: stacked matrices.
            group: the ranks that hold one copy together; None: this one alone.
            dtype: in which matrices travel and are computed with.
        """
        self._group, self._dtype = group, dtype
        self._rank = group.rank() if group else 0
        everybody: list[Any] = [dict(pieces)]
        if group:
            everybody = [None] * group.size()
            dist.all_gather_object(everybody, dict(pieces), group=group)
        self._shapes = {name: (piece.shape[-2], piece.shape[-1]) for name, piece in pieces.items()}
        self._first = {name: piece.offsets[0] for name, piece in pieces.items()}
        self._parts = [_parts(held) for held in everybody]
        units = sorted(set().union(*self._parts))
        local = {unit for unit in units if self._is_whole_where_held(unit)}
        self._local = [unit for unit in self._parts[self._rank] if unit in local]
        self._rounds = [
            self._round(*assigned) for assigned in self._plan([unit for unit in units if unit not in local])
        ]

    def transform(self, shards: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards, fp32, of what `function` makes of whole matrices.

        It gets those of one shape together, [N, R, C].
        A collective call over the group.
        """
        result = {name: torch.empty_like(shard, dtype=torch.float32) for name, shard in shards.items()}
        wholes = {unit: self._view(shards, unit).to(self._dtype) for unit in self._local}
        for unit, made in self._apply(function, wholes).items():
            self._view(result, unit).copy_(made)
        for one in self._rounds:
            self._exchange(one, shards, result, function)
        return result

    def _exchange(
        self, one: _Round, shards: Mapping[str, Tensor], result: dict[str, Tensor], function: Callable[[Tensor], Tensor]
    ) -> None:
        """Send parts to owners, compute, send back."""
        device = next(iter(shards.values())).device
        wholes = {unit: torch.empty(self._shapes[unit.name], dtype=self._dtype, device=device) for unit in one.mine}
        self._send(
            [[self._view(shards, unit) for unit in units] for units in one.give],
            [[self._parts[rank][unit].of(wholes[unit]) for unit in units] for rank, units in enumerate(one.take)],
            device,
        )
        made = self._apply(function, wholes)
        self._send(
            [[self._parts[rank][unit].of(made[unit]) for unit in units] for rank, units in enumerate(one.give_back)],
            [[self._view(result, unit) for unit in units] for units in one.take_back],
            device,
        )

    def _apply(self, function: Callable[[Tensor], Tensor], wholes: Mapping[Unit, Tensor]) -> dict[Unit, Tensor]:
        """Return what the function makes of matrices; those of one shape go through it together."""
        by_shape: dict[tuple[int, int], list[Unit]] = {}
        for unit in wholes:
            by_shape.setdefault(self._shapes[unit.name], []).append(unit)
        made: dict[Unit, Tensor] = {}
        for units in by_shape.values():
            made |= zip(units, function(torch.stack([wholes[unit] for unit in units])), strict=True)
        return made

    def _send(self, given: list[list[Tensor]], taken: list[list[Tensor]], device: torch.device) -> None:
        """Exchange tensors, one message per pair of ranks. What arrives goes into `taken`, views in the live memory."""
        empty = torch.empty(0, dtype=self._dtype, device=device)
        sizes, expected = ([sum(t.numel() for t in tensors) for tensors in lists] for lists in (given, taken))
        parts = (tensor.to(self._dtype).flatten() for tensor in itertools.chain.from_iterable(given))
        arrived = empty.new_empty(sum(expected))
        dist.all_to_all_single(arrived, torch.cat([empty, *parts]), expected, sizes, group=self._group)
        views = list(itertools.chain.from_iterable(taken))
        for view, values in zip(views, arrived.split([view.numel() for view in views]), strict=True):
            view.copy_(values.view_as(view))

    def _is_whole_where_held(self, unit: Unit) -> bool:
        rows, columns = self._shapes[unit.name]
        return all(held[unit].elements == rows * columns for held in self._parts if unit in held)

    def _plan(self, units: list[Unit]) -> list[tuple[list[Unit], dict[Unit, int]]]:
        """Give each unit to the rank with the least work so far, and begin a round where the one before is full."""
        rounds: list[tuple[list[Unit], dict[Unit, int]]] = []
        work = [0] * len(self._parts)
        elements = 0
        for unit in units:
            rows, columns = self._shapes[unit.name]
            if not rounds or elements + rows * columns > ROUND_ELEMENTS * len(self._parts):
                rounds.append(([], {}))
                elements = 0
            owner = work.index(min(work))
            work[owner] += min(rows, columns) * rows * columns
            elements += rows * columns
            rounds[-1][0].append(unit)
            rounds[-1][1][unit] = owner
        return rounds

    def _round(self, units: list[Unit], owners: Mapping[Unit, int]) -> _Round:
        me, ranks = self._rank, range(len(self._parts))
        givers = {unit: self._givers(unit) for unit in units}
        mine = [unit for unit in units if owners[unit] == me]
        return _Round(
            mine=mine,
            give=[[unit for unit in units if owners[unit] == owner and me in givers[unit]] for owner in ranks],
            take=[[unit for unit in mine if rank in givers[unit]] for rank in ranks],
            give_back=[[unit for unit in mine if unit in self._parts[rank]] for rank in ranks],
            take_back=[[unit for unit in units if owners[unit] == o and unit in self._parts[me]] for o in ranks],
        )

    def _givers(self, unit: Unit) -> set[int]:
        """Return the first rank that holds each part of a matrix."""
        first: dict[Part, int] = {}
        for rank, held in enumerate(self._parts):
            if unit in held:
                first.setdefault(held[unit], rank)
        return set(first.values())

    def _view(self, shards: Mapping[str, Tensor], unit: Unit) -> Tensor:
        shard = shards[unit.name]
        return shard if unit.number is None else shard[unit.number - self._first[unit.name]]


def _parts(pieces: Mapping[str, Piece]) -> dict[Unit, Part]:
    """Return what a rank holds of each matrix; nothing of those whose rows it has none of."""
    found: dict[Unit, Part] = {}
    for name, piece in pieces.items():
        if 0 in piece.sizes:
            continue
        spans = [(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True)]
        part = Part(spans[-2], spans[-1])
        numbers: list[int | None] = [None] if len(spans) == 2 else list(range(*spans[0]))
        found |= {Unit(name, number): part for number in numbers}
    return found
