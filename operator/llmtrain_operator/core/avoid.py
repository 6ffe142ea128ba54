"""Which nodes the next workers of a job keep away from, and until when."""

from __future__ import annotations

from llmtrain_api.constants import Action
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.core.observed import Observed, Worker
from llmtrain_operator.core.times import from_timestamp

AVOID_SECONDS = 3600.0
"""So long after it was swapped out a node is avoided: what is still broken then is found again within seconds."""


def avoided_nodes(observed: Observed, status: LLMTrainJobStatus) -> tuple[str, ...]:
    """Return the nodes that were swapped out lately and not forgiven since, sorted."""
    since = max(observed.now - AVOID_SECONDS, from_timestamp(status.nodes_forgiven_at) or 0.0)
    swapped = [failure for failure in status.failures if failure.action is Action.REPLACE_NODE and failure.node]
    return tuple(sorted({f.node for f in swapped if (from_timestamp(f.at) or 0.0) > since}))


def waits_in_vain(worker: Worker, avoided: tuple[str, ...]) -> bool:
    """Tell whether a worker finds no node because of one that need not be avoided (any more)."""
    return _unplaced(worker) and bool(set(worker.avoids) - set(avoided))


def relax_at(observed: Observed, status: LLMTrainJobStatus) -> float | None:
    """Return when (Unix seconds) the avoided nodes are forgiven, because a worker finds no other one; None: never."""
    avoided = set(avoided_nodes(observed, status))
    stuck = [w.created_at for w in observed.workers if _unplaced(w) and avoided & set(w.avoids)]
    return min(stuck) + observed.policy.relax_seconds if stuck else None


def _unplaced(worker: Worker) -> bool:
    return worker.phase == "Pending" and not worker.deleting and not worker.node and bool(worker.unschedulable_message)
