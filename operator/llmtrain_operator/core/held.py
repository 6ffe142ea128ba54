"""How many accelerators a job held, and when: what its ledger multiplies time with."""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain_operator.core.gang import is_finished
from llmtrain_operator.core.observed import Observed, Worker
from llmtrain_operator.core.times import milliseconds

Curve = Sequence[tuple[int, int]]
"""(Unix milliseconds, accelerators held from then on), by rising moments; the first one holds for all time before."""


def placed_at(worker: Worker) -> float | None:
    """Return when the worker got its node (Unix seconds); None where it has none so far."""
    if worker.placed_at is not None:
        return worker.placed_at
    return worker.created_at if worker.agent or worker.phase == "Running" else None


def held_now(observed: Observed) -> int:
    """Return the accelerators of all workers that have a node and have not ended."""
    return len(_placed(observed)) * observed.job.spec.workers.accelerator.count


def curve(observed: Observed, begin: int, before: int) -> Curve:
    """Return what was held: at `begin` (Unix milliseconds) `before`, and more as workers got their nodes.

    What went away since `begin` is taken to have gone now, because its going is the reason for this look.
    """
    count = observed.job.spec.workers.accelerator.count
    found = [(begin, before)]
    for number, moment in enumerate(sorted(_placed(observed)), start=1):
        if number * count > found[-1][1]:
            found.append((max(moment, begin), number * count))
    return found


def integral(held: Curve, start: int, end: int) -> int:
    """Return accelerators times milliseconds between two moments."""
    total = 0
    for number, ((moment, accelerators), (following, _)) in enumerate(zip(held, [*held[1:], (end, 0)], strict=True)):
        since = max(moment, start) if number else start
        total += max(min(following, end) - since, 0) * accelerators
    return total


def _placed(observed: Observed) -> list[int]:
    workers = [worker for worker in observed.workers if not is_finished(worker)]
    moments = [milliseconds(at) for worker in workers if (at := placed_at(worker)) is not None]
    return [moment for moment in moments if moment <= milliseconds(observed.now)]
