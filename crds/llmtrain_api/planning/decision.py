"""The layout of a job that leaves it to the planner (`parallelism.planFor`): the same answer wherever it is asked."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llmtrain_api.constants import API_VERSION, KIND
from llmtrain_api.planning.advice import advice
from llmtrain_api.planning.machine import MACHINES
from llmtrain_api.planning.refusal import nothing_fits
from llmtrain_api.planning.shapes import plan
from llmtrain_api.spec import LLMTrainJobSpec, Parallelism
from llmtrain_api.validation import FieldProblem, complete

_READ = ("workers", "model", "parallelism", "training", "data", "checkpoint")
"""What an answer depends on, and a valid manifest needs; the rest of a spec (suspend, budgets) changes no layout."""
REMEMBERED = 1024


class NoLayoutError(ValueError):
    """No legal layout fits the machine; the problem says what the nearest needs."""

    def __init__(self, problem: FieldProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def decided(spec: LLMTrainJobSpec) -> LLMTrainJobSpec:
    """Return a valid spec with planFor gone and the fields filled in that it leaves to the planner.

    A spec without planFor is returned as it is. An answer takes up to some seconds for thousands of ranks, and is
    remembered.

    Raises:
        NoLayoutError: nothing fits the machine, or no layout is legal.
    """
    if spec.parallelism.plan_for is None:
        return spec
    wire = spec.to_wire()
    answer = _answer(json.dumps({part: wire[part] for part in _READ}, sort_keys=True))
    if isinstance(answer, FieldProblem):
        raise NoLayoutError(answer)
    return spec.model_copy(update={"parallelism": answer})


def layout_problems(manifest: dict[str, Any]) -> list[FieldProblem]:
    """Return what keeps the planner from choosing a layout for a valid manifest; empty where it need not, or can."""
    try:
        decided(LLMTrainJobSpec.model_validate(complete(manifest)["spec"]))
    except NoLayoutError as error:
        return [error.problem]
    return []


@lru_cache(maxsize=REMEMBERED)
def _answer(spec_json: str) -> Parallelism | FieldProblem:
    spec = json.loads(spec_json)
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "job"}, "spec": spec}
    machine = MACHINES[spec["parallelism"]["planFor"]]
    found = plan(manifest, machine, top=1)
    if found.best:
        return found.best[0].axes
    return nothing_fits(manifest, machine, found.smallest, advice(manifest, machine))
