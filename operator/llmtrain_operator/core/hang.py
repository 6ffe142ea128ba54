"""Which rank hangs: from the heartbeats of all workers, the one that the others wait for.

A rank that waits in a collective is overdue as much as the rank that it waits for. So an overdue beat is a suspicion
only: all ranks are asked for their stacks, and the verdict falls on the rank that is furthest behind, if that one is
overdue in its own phase. A rank that is still within its limit, writing a checkpoint say, excuses all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain_api.constants import ConditionType, FailureClass
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.sync_beat import PHASES, Beat
from llmtrain_operator.core.conditions import is_true, with_condition
from llmtrain_operator.core.deadlines import Verdict
from llmtrain_operator.core.failures import Failure, attempt_ranks
from llmtrain_operator.core.gang import Gang
from llmtrain_operator.core.observed import Observed, Worker
from llmtrain_operator.core.text import count

FRESH_SECONDS = 5.0
"""Agents that are asked report every 2 s: a report older than this is of a worker that may be lost."""
LOOK_AGAIN_SECONDS = 1.0
_COLLECTIVES = "torch/distributed/"
_FRAMES_LOOKED_AT = 3
"""Innermost calls among which a collective is looked for: between it and the wait lie a wrapper or two."""
_PLACES = {phase: place for place, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class _Standing:
    """One rank's beat, and whose it is."""

    worker: Worker
    beat: Beat

    @property
    def place(self) -> tuple[int, int]:
        """How far the rank has come; a phase that this operator does not know counts as the end of the step."""
        return self.beat.step, _PLACES.get(self.beat.phase, len(_PLACES))

    @property
    def collective(self) -> str:
        """The call in which the rank waits for others; empty where it does not."""
        frames = self.beat.stack.splitlines()[:_FRAMES_LOOKED_AT]
        found = [frame for frame in frames if _COLLECTIVES in frame]
        return _shown(found[-1]) if found else ""


def suspected(status: LLMTrainJobStatus, gang: Gang) -> bool:
    """Tell whether any rank of the attempt is overdue."""
    return any(standing.beat.overdue for standing in _standings(status, gang))


def judge(observed: Observed, status: LLMTrainJobStatus, gang: Gang) -> Verdict:
    """Return the hang, where it is beyond doubt; until then, when to look again."""
    standings = _standings(status, gang)
    if not any(standing.beat.overdue for standing in standings):
        return Verdict()
    again = Verdict(due=(observed.now + LOOK_AGAIN_SECONDS,))
    if not _all_known(observed, status, gang, standings):
        return again  # a worker that stays silent is lost, and is judged as that
    behind = _behind(standings)
    # Which of several at one place the others wait for is not known for sure, unless one is stopped: judge them all.
    judged = [behind] if _is_stuck(behind) else [s for s in standings if s.place == behind.place]
    if not all(standing.beat.overdue for standing in judged):
        return again
    return Verdict((_failure(observed, behind, standings),))


def with_culprit(observed: Observed, status: LLMTrainJobStatus, gang: Gang, stepped: bool) -> LLMTrainJobStatus:
    """Return the status with the condition Hanging: it names the rank, and holds until the next step is made."""
    standings = _standings(status, gang)
    if status.started_attempt == status.attempt and any(s.beat.overdue for s in standings):
        message = f"{_where(_behind(standings))}; spec.failurePolicy.hang sets the limits"
        return with_condition(observed, status, ConditionType.HANGING, True, "RankBehind", message)
    last = status.failures[-1] if status.failures else None
    if last and last.failure_class is FailureClass.HANG and last.seconds_to_next_step is None and not stepped:
        return with_condition(observed, status, ConditionType.HANGING, True, "Hang", last.message)
    if stepped and is_true(status, ConditionType.HANGING):
        return with_condition(observed, status, ConditionType.HANGING, False, "Stepping")
    return status


def _standings(status: LLMTrainJobStatus, gang: Gang) -> list[_Standing]:
    workers = [w for w in gang.wanted() if w.agent and w.agent.attempt == status.attempt]
    return [_Standing(worker, beat) for worker in workers if worker.agent for beat in worker.agent.beats]


def _all_known(observed: Observed, status: LLMTrainJobStatus, gang: Gang, standings: Sequence[_Standing]) -> bool:
    """Tell whether every rank of the gang runs, and was asked, and its agent has reported of late."""
    agents = [worker.agent for worker in gang.wanted()]
    if any(agent is None or observed.now - agent.reported_at > FRESH_SECONDS for agent in agents):
        return False
    running = [r for w in gang.wanted() for r in attempt_ranks(w, status.attempt) if r.state == "running"]
    world = observed.job.spec.world_size()
    ranks = {standing.beat.global_rank for standing in standings}
    return len(running) == len(standings) == len(ranks) == world and all(s.beat.probed for s in standings)


def _is_stuck(standing: _Standing) -> bool:
    """Tell whether the rank cannot go on, whatever the others do."""
    return standing.beat.stopped and standing.beat.overdue


def _behind(standings: Sequence[_Standing]) -> _Standing:
    """Return the rank furthest behind: at one place a stopped process, then one that waits for nobody."""

    def order(standing: _Standing) -> tuple[bool, tuple[int, int], bool, float, int]:
        beat = standing.beat
        return (not _is_stuck(standing), standing.place, bool(standing.collective), -beat.seconds, beat.global_rank)

    return min(standings, key=order)


def _failure(observed: Observed, culprit: _Standing, standings: Sequence[_Standing]) -> Failure:
    beat = culprit.beat
    message = f"{_where(culprit, 'hangs')} for {beat.seconds:.0f} s"
    if beat.stopped:
        message += " (process stopped)"
    elif beat.process_state == "D":
        message += " (process waits in the kernel)"
    if beat.stack:
        message += f": {_shown(beat.stack.splitlines()[0])}"
    others = [s for s in standings if s is not culprit]
    if others:
        phase = others[0].beat.phase
        call = next((s.collective for s in others if s.collective), "")
        same = [s for s in others if s.beat.phase == phase]
        message += f"; {count(len(same), 'other rank')} in {phase}" + (f": {call}" if call else "")
    return Failure(
        FailureClass.HANG,
        message,
        observed.now,
        worker=culprit.worker,
        index=culprit.worker.index,
        rank=beat.global_rank,
    )


def _where(standing: _Standing, does: str = "is behind") -> str:
    beat, worker = standing.beat, standing.worker
    node = f" ({worker.node})" if worker.node else ""
    step = f" of step {beat.step}" if beat.step else ""
    return f"rank {beat.global_rank} on worker {worker.index}{node} {does} in {beat.phase}{step}"


def _shown(frame: str) -> str:
    """Return a line of a stack without the folders that are the same for all: 'x/y.py line 3 in f'."""
    path, _, rest = frame.removeprefix('File "').partition('", ')
    for root in ("/site-packages/", "/trainer/"):
        path = path.rpartition(root)[2]
    return f"{path} {rest}"
