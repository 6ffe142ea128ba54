"""The goodput ledger: wall time since the job's creation, split into parts that add up to it to the millisecond.

Each look books the time from `accountedUntil` to now, starting from what the durable status says, so a look whose
status is not written leaves nothing behind, and an operator that begins anew books the same. What earlier looks took
for steps that count is moved where it turns out not to be: back to the last step at a fault, and back to the restored
step at the first step after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain_api.constants import TERMINAL_STATES, FailureClass, GoodputPart, State
from llmtrain_api.status import FailureStatus, LLMTrainJobStatus
from llmtrain_api.status_goodput import MAX_MARKS, GoodputMark, GoodputParts, GoodputStatus
from llmtrain_api.sync import Progress
from llmtrain_operator.core.gang import assemble
from llmtrain_operator.core.held import curve, held_now, integral, placed_at
from llmtrain_operator.core.observed import Observed
from llmtrain_operator.core.progress import LARGEST, newest
from llmtrain_operator.core.times import from_timestamp, milliseconds, to_timestamp

WAITING = (GoodputPart.SCHEDULING, GoodputPart.START)
LARGEST_COST = 999_999_999_999.99
Turn = tuple[int, GoodputPart]
"""From this moment on (Unix milliseconds) time goes into this part."""


@dataclass(frozen=True)
class _Facts:
    """What one look knows of the time that it books; moments are Unix milliseconds."""

    begin: int
    now: int
    part: GoodputPart
    """What the time from `begin` on goes into, until a turn."""
    report: Progress | None
    """Of the attempt under way, where it has made a step."""
    first_seen: bool
    """The ledger knows of no step of this attempt so far."""
    failure: FailureStatus | None
    """Recorded by this very look."""

    @property
    def stepping(self) -> bool:
        """Whether the attempt was making steps at some time up to now."""
        return self.part is GoodputPart.COMPUTE or self.first_seen


class _Amounts:
    """Milliseconds by part, and the same times the accelerators held, while they are being booked."""

    def __init__(self, ledger: GoodputStatus) -> None:
        self.wall = _amounts(ledger.milliseconds)
        self.accelerator = _amounts(ledger.accelerator_milliseconds)

    @property
    def compute(self) -> int:
        """What went into steps that count, so far."""
        return self.wall[GoodputPart.COMPUTE]

    def add(self, part: GoodputPart, amount: int, accelerator: int) -> None:
        """Book; of accelerators never below zero, because a ledger may be older than their count."""
        self.wall[part] += amount
        self.accelerator[part] = max(self.accelerator[part] + accelerator, 0)

    def move(self, part: GoodputPart, amount: int, held: int) -> None:
        """Take milliseconds of steps for another part, in which so many accelerators were held."""
        accelerator = min(amount * held, self.accelerator[GoodputPart.COMPUTE])
        self.add(GoodputPart.COMPUTE, -amount, -accelerator)
        self.add(part, amount, accelerator)


def with_ledger(observed: Observed, status: LLMTrainJobStatus) -> LLMTrainJobStatus:
    """Return the decided status with all time up to now booked; without a readable creation time there is no ledger."""
    created = from_timestamp(observed.job.metadata.creation_timestamp)
    if created is None:
        return status
    ledger, now = _ledger(observed, milliseconds(created)), milliseconds(observed.now)
    if ledger is None:
        ledger = _opened(milliseconds(created), now, observed.job.status.attempt if _trains(observed) else 0)
        facts = _Facts(now, now, GoodputPart.IDLE, None, False, None)
    else:
        facts = _facts(observed, status, ledger, now)
        ledger = _booked(observed, status, ledger, facts)
    amount = ledger.accelerator_milliseconds.total()
    hours, price = amount * 100 // 3_600_000, observed.policy.accelerator_hour_price
    told: dict[str, object] = {
        "part": _next_part(status, facts),
        "percent": _percent(ledger.milliseconds),
        "accelerators_held": held_now(observed),
        "accelerator_hours": f"{hours // 100}.{hours % 100:02}",
        "cost": f"{min(amount / 3_600_000 * price, LARGEST_COST):.2f}" if price > 0 else "",
    }
    return status.model_copy(update={"goodput": ledger.model_copy(update=told)})


def _ledger(observed: Observed, created: int) -> GoodputStatus | None:
    """Return the durable ledger; an empty one for a new job; None where it does not fit the job's age."""
    old = observed.job.status
    if old.goodput is None:
        return None if old.attempt else GoodputStatus(accounted_until=to_timestamp(created / 1000))
    until = from_timestamp(old.goodput.accounted_until)
    exact = until is not None and old.goodput.milliseconds.total() == milliseconds(until) - created
    return old.goodput if exact else None


def _opened(created: int, now: int, attempt: int) -> GoodputStatus:
    """Return a ledger that knows nothing of what went before."""
    until = max(created, now)
    parts = GoodputParts(idle=until - created)
    return GoodputStatus(accounted_until=to_timestamp(until / 1000), milliseconds=parts, attempt=attempt)


def _facts(observed: Observed, status: LLMTrainJobStatus, ledger: GoodputStatus, now: int) -> _Facts:
    old, report = observed.job.status, newest(observed)
    begin = milliseconds(from_timestamp(ledger.accounted_until) or 0.0)
    if report is not None and not (report.attempt == old.attempt == old.started_attempt):
        report = None
    failure = status.failures[-1] if status.failures else None
    known = old.failures[-1].attempt if old.failures else 0
    return _Facts(
        begin=begin,
        now=max(begin, now),
        part=ledger.part,
        report=report,
        first_seen=report is not None and report.attempt > ledger.attempt,
        failure=failure if failure and failure.attempt == old.attempt != known else None,
    )


def _booked(observed: Observed, status: LLMTrainJobStatus, ledger: GoodputStatus, facts: _Facts) -> GoodputStatus:
    parts, marks = _Amounts(ledger), list(ledger.marks)
    held = curve(observed, facts.begin, ledger.accelerators_held)
    if facts.first_seen and facts.report:
        marks = _restored(parts, marks, facts.report, held[-1][1])
    turns = _turns(observed, status, facts)
    sure = marks[-1].compute_milliseconds if marks else 0
    if facts.stepping:
        # Steps stopped before what was booked so far: at the earliest at the newest one that is known to be done.
        stop = next((at for at, part in turns[1:] if part is not GoodputPart.COMPUTE), facts.now)
        back = min(max(facts.begin - stop, 0), parts.compute - sure)
        parts.add(GoodputPart.COMPUTE, -back, -back * ledger.accelerators_held)
        turns = [(facts.begin - back, turns[0][1]), *turns[1:]]
    for part, start, end in _spans(turns, facts.now):
        parts.add(part, end - start, integral(held, start, end))
    report, stall = facts.report, 0
    if report and facts.stepping:
        told = round(min(max(report.checkpoint_stall_seconds, 0.0), 1e12) * 1000)
        known = ledger.attempt_checkpoint_stall_milliseconds if report.attempt == ledger.attempt else 0
        moved = min(max(told - known, 0), parts.compute - sure)
        parts.move(GoodputPart.CHECKPOINT_STALL, moved, held[-1][1])
        stall = known + moved
        marks = _marked(marks, report, facts, parts.compute)
    update: dict[str, object] = {
        "milliseconds": _parts(parts.wall),
        "accelerator_milliseconds": _parts(parts.accelerator),
        "accounted_until": to_timestamp(facts.now / 1000),
        "marks": _thinned(marks),
    }
    if report and facts.stepping:
        update |= {"attempt": report.attempt, "attempt_checkpoint_stall_milliseconds": stall}
    return ledger.model_copy(update=update)


def _turns(observed: Observed, status: LLMTrainJobStatus, facts: _Facts) -> list[Turn]:
    """Return what the time from `begin` on went into. A turn away from steps may lie before `begin`."""
    turns = [(facts.begin, facts.part)]
    if facts.part in WAITING:
        turns = [(facts.begin, GoodputPart.SCHEDULING), (_placed(observed, facts.now), GoodputPart.START)]
    report, failure = facts.report, facts.failure
    if facts.first_seen and report:
        turns.append((max(milliseconds(report.first_step_at), facts.begin), GoodputPart.COMPUTE))
    fault = facts.now if failure is None else min(_fault(observed, failure), facts.now)
    stop = min(milliseconds(report.step_at), fault) if report else fault
    if failure and facts.stepping and failure.failure_class is FailureClass.HANG:
        turns.append((stop, GoodputPart.HANG))
    elif failure and facts.stepping:
        turns += [(stop, GoodputPart.REDONE), (fault, GoodputPart.RESTART)]
    elif failure:
        turns.append((fault, GoodputPart.RESTART))
    elif status.state is State.SUCCEEDED and facts.stepping:
        turns.append((stop, GoodputPart.CHECKPOINT_STALL))
    return turns


def _fault(observed: Observed, failure: FailureStatus) -> int:
    """Return when the fault was: a node is lost when it was last heard of, not when that was judged."""
    at = from_timestamp(failure.at) or observed.now
    if failure.failure_class is FailureClass.NODE_LOST:
        heard = [w.agent.last_seen for w in observed.workers if w.agent and w.name == failure.pod]
        at = min([at, *heard])
    return milliseconds(at)


def _placed(observed: Observed, now: int) -> int:
    """Return when the last worker of the gang got its node; `now` while one has none."""
    slots = assemble(observed, observed.job.status).slots
    moments = [placed_at(slot.wanted) if slot.wanted else None for slot in slots]
    known = [milliseconds(at) for at in moments if at is not None]
    return max(known) if known and len(known) == len(moments) else now


def _spans(turns: Sequence[Turn], now: int) -> list[tuple[GoodputPart, int, int]]:
    """Return (part, from, to) that cover exactly from the first turn to `now`, however wrong the moments are."""
    spans = []
    at, part = turns[0]
    for moment, following in turns[1:]:
        moment = min(max(moment, at), now)
        spans.append((part, at, moment))
        at, part = moment, following
    return [*spans, (part, at, now)]


# --- steps


def _restored(parts: _Amounts, marks: list[GoodputMark], report: Progress, held: int) -> list[GoodputMark]:
    """Move the time of the steps that are made again, and forget them."""
    # A run that was complete already names its last step as the first one.
    restored = min(max(report.first_step - 1, report.resumed_from, 0), LARGEST - 1)
    kept = _until(marks, restored, parts.compute)
    parts.move(GoodputPart.REDONE, parts.compute - kept, held)
    # The first step belongs to what went before it, so it adds nothing to the steps that count.
    fresh = [GoodputMark(step=step, compute_milliseconds=kept) for step in (restored, restored + 1)]
    return [*(mark for mark in marks if mark.step < restored), *fresh]


def _until(marks: Sequence[GoodputMark], step: int, total: int) -> int:
    """Return how long the steps up to this one took, of all in milliseconds: steps between two marks were alike."""
    points = [(0, 0), *((mark.step, mark.compute_milliseconds) for mark in marks if mark.step > 0)]
    after = next((i for i, point in enumerate(points) if point[0] > step), len(points) - 1)
    if after == 0:  # nothing is known but that training began
        return total if step else 0
    (s0, c0), (s1, c1) = points[after - 1], points[after]
    at_step = c0 + (step - s0) * max(c1 - c0, 0) // max(s1 - s0, 1)
    return min(max(at_step, 0), total)


def _marked(marks: list[GoodputMark], report: Progress, facts: _Facts, compute: int) -> list[GoodputMark]:
    """Return the marks with the newest step."""
    last = marks[-1] if marks else GoodputMark(step=0, compute_milliseconds=0)
    step = min(max(report.step, 0), LARGEST)
    if step <= last.step:
        return marks
    stopped = facts.failure is not None  # then what comes after the step is no compute
    since = 0 if stopped else max(facts.now - milliseconds(report.step_at), 0)
    at_step = min(max(compute - since, last.compute_milliseconds), compute)
    return [*marks, GoodputMark(step=step, compute_milliseconds=at_step)]


def _thinned(marks: Sequence[GoodputMark]) -> list[GoodputMark]:
    """Return at most MAX_MARKS: of the older half every second one goes, so old ones lie ever further apart."""
    if len(marks) <= MAX_MARKS:
        return list(marks)
    half = len(marks) // 2
    return [*marks[:half:2], *marks[half:]][-MAX_MARKS:]


# --- words and numbers


def _next_part(status: LLMTrainJobStatus, facts: _Facts) -> GoodputPart:
    if status.state is State.SUSPENDED:
        return GoodputPart.SUSPENDED
    if status.state is State.BLOCKED or status.state in TERMINAL_STATES:
        return GoodputPart.IDLE
    if status.state is State.TRAINING:
        return GoodputPart.COMPUTE
    goes_on = facts.part is GoodputPart.RESTART and not facts.first_seen
    unknown = facts.part is GoodputPart.IDLE and status.state is State.RESTARTING
    return GoodputPart.RESTART if facts.failure or goes_on or unknown else GoodputPart.SCHEDULING


def _trains(observed: Observed) -> bool:
    return observed.job.status.state is State.TRAINING


def _percent(parts: GoodputParts) -> str:
    wall = parts.total()
    tenths = parts.compute * 1000 // wall if wall else 0
    return f"{tenths // 10}.{tenths % 10}"


def _amounts(parts: GoodputParts) -> dict[GoodputPart, int]:
    wire = parts.to_wire()
    return {part: wire[part.value] for part in GoodputPart}


def _parts(amounts: dict[GoodputPart, int]) -> GoodputParts:
    return GoodputParts.model_validate({part.value: amount for part, amount in amounts.items()})
