"""What the agents report about training: steps, checkpoints, and what the last failures have cost."""

from __future__ import annotations

import math

from llmtrain_api.constants import State
from llmtrain_api.status import CheckpointStatus, FailureStatus, LLMTrainJobStatus, ProgressStatus
from llmtrain_api.sync import Progress
from llmtrain_operator.core import budgets
from llmtrain_operator.core.names import checkpoint_uri
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.text import shorten
from llmtrain_operator.core.times import from_timestamp, to_timestamp

LARGEST = 2**63 - 1


def newest(observed: Observed) -> Progress | None:
    """Return the newest report of the newest attempt."""
    reports = [worker.agent.progress for worker in observed.workers if worker.agent and worker.agent.progress]
    known = [report for report in reports if report.attempt <= observed.job.status.attempt]
    return max(known, key=lambda report: (report.attempt, report.step, report.step_at), default=None)


def absorb(observed: Observed, status: LLMTrainJobStatus) -> LLMTrainJobStatus:
    """Return the status with progress, checkpoint, refilled budgets and the cost of failures brought up to date."""
    report = newest(observed)
    if report is None:
        return status
    status = _absorb_checkpoint(observed, status, report)
    if report.attempt == status.attempt == status.started_attempt:
        status = status.model_copy(update={"failures": [_with_cost(failure, report) for failure in status.failures]})
    elif status.progress and status.state is not State.TRAINING:
        return status  # a late report of an attempt that is over, already accounted for
    return status.model_copy(update={"progress": _progress(observed, status.progress, report)})


def has_stepped(observed: Observed, status: LLMTrainJobStatus) -> bool:
    """Tell whether the attempt has made an optimizer step: reported now, or known from the status."""
    if status.started_attempt != status.attempt:
        return False
    report, old = newest(observed), observed.job.status
    reported = report is not None and report.attempt == status.attempt
    return reported or (old.state is State.TRAINING and old.attempt == status.attempt)


def _absorb_checkpoint(observed: Observed, status: LLMTrainJobStatus, report: Progress) -> LLMTrainJobStatus:
    old = status.checkpoint
    update: dict[str, object] = {
        "skipped": shorten(report.skipped_checkpoints),
        "failed": shorten(report.failed_checkpoint),
    }
    advanced = old.last_good_step < report.checkpoint_step <= LARGEST
    if advanced:
        update["last_good_step"] = report.checkpoint_step
        update["uri"] = checkpoint_uri(observed.job, report.checkpoint_step)
        update["committed_at"] = to_timestamp(report.checkpoint_at or observed.now)
    checkpoint: CheckpointStatus = old.model_copy(update=update)
    restarts = budgets.refill(status.restarts) if advanced else status.restarts
    return status.model_copy(update={"checkpoint": checkpoint, "restarts": restarts})


def _with_cost(failure: FailureStatus, report: Progress) -> FailureStatus:
    at = from_timestamp(failure.at)
    if failure.seconds_to_next_step is not None or failure.attempt >= report.attempt or at is None:
        return failure
    seconds = min(max(report.first_step_at - at, 0.0), float(LARGEST))
    # The agent of rank 0 saw every step; the status only some of them. A replaced agent saw none.
    reached = max(report.previous_step, -1 if failure.step is None else failure.step)
    lost = None if reached < 0 else _count(reached - (report.first_step - 1))
    return failure.model_copy(update={"seconds_to_next_step": f"{seconds:.2f}"[:32], "lost_steps": lost})


def _progress(observed: Observed, old: ProgressStatus | None, report: Progress) -> ProgressStatus:
    step, steps = _count(report.step), _count(report.steps)
    fresh = ProgressStatus(
        step=step,
        steps=steps,
        tokens=str(_count(report.tokens)),
        loss=f"{report.loss:.6g}",
        tokens_per_second=f"{report.tokens_per_second:.6g}",
        skipped_steps=_count(report.skipped_steps),
        eta_seconds=_eta(report),
        updated_at=to_timestamp(observed.now),
    )
    same = old is not None and fresh.model_copy(update={"updated_at": old.updated_at}) == old
    return old if old is not None and same else fresh


def _eta(report: Progress) -> int | None:
    """Seconds that the remaining steps take at the reported rate."""
    if report.step <= 0 or report.tokens <= 0 or not 0 < report.tokens_per_second < math.inf:
        return None
    remaining = max(report.steps - report.step, 0)
    eta = remaining * (report.tokens / report.step) / report.tokens_per_second
    return _count(int(eta)) if math.isfinite(eta) else None


def _count(value: int) -> int:
    return min(max(value, 0), LARGEST)
