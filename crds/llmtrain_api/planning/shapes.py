"""Every legal way to lay a job out, the fastest that fit first.

What is legal is asked of the resource's own rules, with the job's manifest patched; nothing about it is known here. A
division of ranks can be run with several schedules, kinds of recomputation and stages of ZeRO; of those the plan takes
the fastest that fits. GPipe is not tried: 1F1B idles as long and holds fewer micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from llmtrain_api.crdgen import job_schema
from llmtrain_api.planning.estimate import Estimate, estimate, pipeline_of, step_seconds
from llmtrain_api.planning.layout import Layout, Workload
from llmtrain_api.planning.machine import Machine
from llmtrain_api.planning.memory import Memory, needed
from llmtrain_api.rule import Rule, Scope
from llmtrain_api.rules import RULES
from llmtrain_api.spec import LLMTrainJobSpec, Parallelism, PipelineSchedule
from llmtrain_api.validation import complete

AXES = ("tensor", "context", "pipeline", "replicate", "expert")
SCHEDULES: tuple[PipelineSchedule, ...] = ("1F1B", "Interleaved1F1B", "ZBV", "DualPipeV")
RECOMPUTES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
ZERO_STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
"""Stage 0 sends as much as stage 1 and computes more: no plan proposes it."""
_ASKED_AGAIN = ("parallelism.zeroStage", "parallelism.recompute")
"""What does not change the division: rules that read it are asked once for each value, the others once."""


@dataclass(frozen=True)
class Plan:
    """What is known about a job on a machine."""

    asked: Estimate
    """As the file has it."""
    best: list[Estimate]
    """Of layouts that fit, the fastest first; each division of ranks once, in its fastest form."""
    smallest: Estimate | None
    """Of all legal layouts, the one that needs least memory; None where one fits."""
    divisions: int
    """Legal divisions of the ranks, whether they fit or not."""


def plan(manifest: dict[str, Any], machine: Machine, top: int) -> Plan:
    """Return the `top` fastest layouts of a valid manifest that fit, and how the file's own compares."""
    spec = complete(manifest)["spec"]
    parsed = LLMTrainJobSpec.model_validate(spec)
    search = _Search(spec, Workload.of(parsed), machine)
    legal = list(search.divisions())
    best = search.fastest(legal, top)
    return Plan(
        asked=estimate(search.work, parsed.parallelism, machine),
        best=best,
        smallest=None if best else search.smallest(legal),
        divisions=len({_division(axes) for axes in legal}),
    )


def smallest(manifest: dict[str, Any], machine: Machine) -> Estimate:
    """Return the legal layout of a valid manifest that needs least memory."""
    spec = complete(manifest)["spec"]
    search = _Search(spec, Workload.of(LLMTrainJobSpec.model_validate(spec)), machine)
    return search.smallest(list(search.divisions()))


def legal_axes(manifest: dict[str, Any]) -> list[Parallelism]:
    """Return the legal divisions of a valid manifest's ranks, with each schedule that is legal for it."""
    spec = complete(manifest)["spec"]
    search = _Search(spec, Workload.of(LLMTrainJobSpec.model_validate(spec)), None)
    return list(search.divisions())


class _Search:
    def __init__(self, spec: dict[str, Any], work: Workload, machine: Machine | None) -> None:
        self._spec, self.work, self._machine = spec, work, machine
        about = [rule for rule in RULES if rule.at == "spec" and any(f.startswith("parallelism.") for f in rule.reads)]
        again = [rule for rule in about if set(_ASKED_AGAIN) & set(rule.reads)]
        self._about_form = again
        self._about_division = [rule for rule in about if rule not in again]

    def divisions(self) -> Iterator[Parallelism]:
        """Yield what the rules allow, in a form that any rule about the form may still refuse."""
        for degrees in self._degrees():
            schedules = SCHEDULES if degrees["pipeline"] > 1 else SCHEDULES[:1]
            for schedule in schedules:
                axes = Parallelism(**degrees, pipeline_schedule=schedule, zero_stage=1, recompute="none")
                if self._holds(self._about_division, axes):
                    yield axes

    def fastest(self, legal: list[Parallelism], top: int) -> list[Estimate]:
        """Return the best of each division, the fastest first.

        No form of a division is faster than those that recompute nothing and keep parameters whole, so the search ends
        where that bound is slower than what has been found.
        """
        assert self._machine is not None
        times = [self._bound(axes, self._machine) for axes in legal]
        bounds = sorted(zip(times, range(len(legal)), legal, strict=True))
        found: dict[tuple[int, ...], Estimate] = {}
        for bound, _, axes in bounds:
            ranked = sorted(one.step_seconds for one in found.values())
            if len(ranked) >= top and bound > ranked[top - 1]:
                break
            own = self._fastest_form(axes)
            key = _division(axes)
            if own and (key not in found or own.step_seconds < found[key].step_seconds):
                found[key] = own
        return sorted(found.values(), key=lambda one: one.step_seconds)[:top]

    def _bound(self, axes: Parallelism, machine: Machine) -> float:
        """Return the seconds of the fastest form: parameters gathered at once, or (FSDP2) beside forward."""
        forms = (axes, axes.model_copy(update={"zero_stage": 2}))
        return min(step_seconds(self.work, form, machine) for form in forms)

    def smallest(self, legal: list[Parallelism]) -> Estimate:
        """Return the legal layout that needs least memory."""
        forms = ((self._memory(form).total, n, form) for n, axes in enumerate(legal) for form in self._smallest(axes))
        return self._estimate(min(forms)[2])

    def _degrees(self) -> Iterator[dict[str, int]]:
        """Yield axes whose product can divide the ranks, within the bounds of their fields."""
        bounds = {axis: field.get("maximum", self.work.ranks) for axis, field in _fields().items()}
        ranks, moe = self.work.ranks, self.work.dims.moe
        experts = _divisors(moe.experts if moe else 1, bounds["expert"])
        for tensor in _divisors(ranks, bounds["tensor"]):
            for context in _divisors(ranks // tensor, bounds["context"]):
                for pipeline in _divisors(ranks // tensor // context, bounds["pipeline"]):
                    left = ranks // tensor // context // pipeline
                    for replicate in _divisors(left, bounds["replicate"]):
                        for expert in experts:
                            yield dict(zip(AXES, (tensor, context, pipeline, replicate, expert), strict=True))

    def _fastest_form(self, axes: Parallelism) -> Estimate | None:
        limit = self._limit()
        if not any(self._memory(form).total <= limit for form in self._smallest(axes)):
            return None
        forms = []
        for recompute in RECOMPUTES:
            for stage in ZERO_STAGES:
                form = axes.model_copy(update={"recompute": recompute, "zero_stage": stage})
                if self._holds(self._about_form, form) and self._memory(form).total <= limit:
                    forms.append(self._estimate(form))
        return min(forms, key=lambda one: one.step_seconds, default=None)

    def _smallest(self, axes: Parallelism) -> list[Parallelism]:
        """Return the form of a division that needs least memory; none where the rules refuse all of them."""
        for stage in reversed(ZERO_STAGES):
            form = axes.model_copy(update={"recompute": "full", "zero_stage": stage})
            if self._holds(self._about_form, form):
                return [form]
        return []

    def _limit(self) -> float:
        assert self._machine is not None
        return self._machine.rank_memory(self.work.ranks_per_worker)

    def _estimate(self, axes: Parallelism) -> Estimate:
        assert self._machine is not None
        return estimate(self.work, axes, self._machine)

    def _memory(self, axes: Parallelism) -> Memory:
        pipeline = pipeline_of(self.work.dims, axes.pipeline, axes.pipeline_schedule)
        return needed(Layout(self.work, axes), pipeline)

    def _holds(self, rules: list[Rule], axes: Parallelism) -> bool:
        scope = Scope({**self._spec, "parallelism": {**self._spec["parallelism"], **_written(axes)}})
        return all(rule.holds(scope) for rule in rules)


def _written(axes: Parallelism) -> dict[str, Any]:
    return {
        **{axis: getattr(axes, axis) for axis in AXES},
        "pipelineSchedule": axes.pipeline_schedule,
        "zeroStage": axes.zero_stage,
        "recompute": axes.recompute,
    }


def _division(axes: Parallelism) -> tuple[int, ...]:
    return tuple(getattr(axes, axis) for axis in AXES)


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = job_schema()["properties"]["spec"]["properties"]["parallelism"]["properties"]
    return {axis: fields[axis] for axis in AXES}


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
