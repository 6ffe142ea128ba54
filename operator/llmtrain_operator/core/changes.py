"""When a new status is worth a write to the API server: a healthy job writes at most twice a minute."""

from __future__ import annotations

from llmtrain_api.status import LLMTrainJobStatus, ProgressStatus
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.times import from_timestamp

READY_STEPS = 4
"""The number of ready workers is written at each quarter of the way, not for each of thousands of workers."""


def worth_writing(observed: Observed, new: LLMTrainJobStatus) -> bool:
    """Tell whether the status must be written now. What only follows training waits for its period."""
    old = observed.job.status
    if _released(old, new):
        return True
    if not differs(old, new):
        return False
    if _material(new) != _material(old) or _milestone(new) != _milestone(old):
        return True
    return next_write_at(observed) <= observed.now


def differs(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> bool:
    """Tell whether anything but the ledger differs: that one grows with every look, and is written along."""
    return new.model_copy(update={"goodput": None}) != old.model_copy(update={"goodput": None})


def next_write_at(observed: Observed) -> float:
    """Return the time (Unix seconds) from which young progress is written."""
    progress: ProgressStatus | None = observed.job.status.progress
    written_at = from_timestamp(progress.updated_at) if progress else None
    return 0.0 if written_at is None else written_at + observed.policy.status_period_seconds


def _released(old: LLMTrainJobStatus, new: LLMTrainJobStatus) -> bool:
    """Tell whether half of what was held is gone: the ledger must not count it on. So often a gang can only halve."""
    before, now = (status.goodput.accelerators_held if status.goodput else 0 for status in (old, new))
    return before > 0 and now * 2 <= before


def _material(status: LLMTrainJobStatus) -> LLMTrainJobStatus:
    # Counts that are back at zero say that a job is well again; while they only grow, the restart itself is told.
    spent = {"Any": 1} if status.restarts.since_progress or status.restarts.by_worker_since_progress else {}
    restarts = status.restarts.model_copy(update={"since_progress": spent, "by_worker_since_progress": {}})
    workers = status.workers.model_copy(update={"ready": 0, "summary": ""})
    unwritten = {"progress": None, "checkpoint": None, "goodput": None, "restarts": restarts, "workers": workers}
    return status.model_copy(update=unwritten)


def _milestone(status: LLMTrainJobStatus) -> int:
    return status.workers.ready * READY_STEPS // status.workers.desired if status.workers.desired else 0
