"""Which rank is slow: by each rank's own time per step, compared with that of its peers.

All ranks of a gang take equally long for a step; the slow one alone is busy all the while. Ranks of one pipeline stage
are peers: they have equal work. What ranks tell are medians of about thirty seconds, so nothing has to be remembered:
the verdict is made anew at each look, also by an operator that has just started.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmtrain_api.constants import ConditionType, FailureClass
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.sync_beat import Own
from llmtrain_operator.core import budgets as budget
from llmtrain_operator.core.conditions import is_true, with_condition
from llmtrain_operator.core.failures import Failure
from llmtrain_operator.core.gang import Gang
from llmtrain_operator.core.observed import Observed, Worker
from llmtrain_operator.core.text import count
from llmtrain_operator.core.times import from_timestamp

FRESH_SECONDS = 12.0
"""Agents report every 4 s: an older report is of a worker that may be lost."""
SPAN_SECONDS = 20.0
"""Medians of less time than this say too little."""
LEAST_PART = 0.1
"""Of the step's time: what a slow rank costs must be worth telling."""
REPLACE_AGAIN_SECONDS = 3600.0
"""No second worker is replaced for slowness sooner: where many nodes differ, moving between them gains nothing."""
KINDS = {"compute_seconds": "compute", "loading_seconds": "loading data", "device_seconds": "its device"}


@dataclass(frozen=True)
class Slow:
    """One rank, and how slow it is in what."""

    worker: Worker
    rank: int
    kind: str
    own: float
    """Seconds per step, or of one product of matrices."""
    usual: float
    """The median of its peers, in the same unit."""
    peers: int
    step: float
    """Seconds from one step to the next."""

    @property
    def ratio(self) -> float:
        return self.own / self.usual if self.usual else float("inf")

    @property
    def where(self) -> str:
        return f"rank {self.rank} on worker {self.worker.index}"

    @property
    def message(self) -> str:
        node = f" ({self.worker.node})" if self.worker.node else ""
        times = f"{self.ratio:.1f} times as long as the median of its {count(self.peers, 'peer')}"
        return (
            f"{self.where}{node} takes {times} for {KINDS[self.kind]}: {_short(self.own)} instead of "
            f"{_short(self.usual)}, with steps of {_short(self.step)}"
        )


@dataclass(frozen=True)
class _Told:
    worker: Worker
    rank: int
    own: Own


def slow_ranks(observed: Observed, status: LLMTrainJobStatus, gang: Gang, percent: int) -> list[Slow] | None:
    """Return the ranks that need `percent` % more own time than their peers, slowest first; None: not known yet."""
    told = list(_told(observed, status, gang))
    if len(told) < observed.job.spec.world_size():
        return None
    stages: dict[int, list[_Told]] = defaultdict(list)
    for one in told:
        stages[one.own.stage].append(one)
    found = [slow for peers in stages.values() for kind in KINDS for slow in _slow_of(peers, kind, percent)]
    return sorted(found, key=lambda slow: (-slow.ratio, slow.rank))


def judge(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> Failure | None:
    """Return the slowest rank as a failure, where the user wants its worker replaced and may have that."""
    policy = observed.job.spec.failure_policy
    if policy.straggler.action != "ReplaceNode" or not _may_replace(observed, status):
        return None
    slow = slow_ranks(observed, status, gang, policy.straggler.slowdown_percent)
    if not slow:
        return None
    return Failure(
        FailureClass.HARDWARE,
        slow[0].message,
        observed.now,
        worker=slow[0].worker,
        index=slow[0].worker.index,
        rank=slow[0].rank,
        replace=True,
        graceful=True,
    )


def with_straggler(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> LLMTrainJobStatus:
    """Return the status with the condition Straggling: it names the slowest rank, and holds until none is slow.

    The message stays as long as its rank is slow: figures that change at each look would be a write at each look.
    """
    percent = observed.job.spec.failure_policy.straggler.slowdown_percent
    held = is_true(status, ConditionType.STRAGGLING)
    slow = slow_ranks(observed, status, gang, percent // 2 if held else percent)
    if slow is None or (not slow and not held):
        return status
    if not slow:
        return with_condition(observed, status, ConditionType.STRAGGLING, False, "Even")
    old = status.condition(ConditionType.STRAGGLING)
    if held and old and any(old.message.startswith(f"{one.where} ") for one in slow):
        return status
    return with_condition(observed, status, ConditionType.STRAGGLING, True, "RankSlow", slow[0].message)


def _told(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> Iterator[_Told]:
    for worker in gang.wanted():
        agent = worker.agent
        if agent and agent.attempt == status.attempt and observed.now - agent.reported_at <= FRESH_SECONDS:
            for beat in agent.beats:
                if beat.own and beat.own.span_seconds >= SPAN_SECONDS:
                    yield _Told(worker, beat.global_rank, beat.own)


def _slow_of(told: Sequence[_Told], kind: str, percent: int) -> Iterator[Slow]:
    values = sorted(_value(one, kind) for one in told)
    for one in told:
        value = _value(one, kind)
        usual = _median_of_others(values, value)
        if usual is None or value <= usual * (1 + percent / 100):
            continue
        if kind != "device_seconds" and value - usual < LEAST_PART * one.own.step_seconds:
            continue
        yield Slow(one.worker, one.rank, kind, value, usual, len(told) - 1, one.own.step_seconds)


def _value(one: _Told, kind: str) -> float:
    return float(getattr(one.own, kind))


def _median_of_others(ordered: Sequence[float], value: float) -> float | None:
    """Return the (lower) median of all but one `value` of an ordered sequence; None where nothing is left."""
    if len(ordered) < 2:
        return None
    middle = (len(ordered) - 2) // 2
    return ordered[middle] if ordered[middle] < value else ordered[middle + 1]


def _may_replace(observed: Observed, status: LLMTrainJobStatus) -> bool:
    """Tell whether a replacement is allowed: it must never be what makes a job fail, nor happen again and again."""
    limits = observed.job.spec.failure_policy.budgets
    if budget.exhausted(limits, status.restarts, FailureClass.HARDWARE):
        return False
    hardware = [failure for failure in status.failures if failure.failure_class is FailureClass.HARDWARE]
    return all(observed.now - (from_timestamp(f.at) or 0.0) > REPLACE_AGAIN_SECONDS for f in hardware)


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
