"""What the planner chooses for a job that leaves its layout to it: the fastest that fits, the same each time."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from llmtrain_api.planning import decision
from llmtrain_api.planning.decision import NoLayoutError, decided, layout_problems
from llmtrain_api.planning.machine import MACHINES, MachineName
from llmtrain_api.planning.shapes import plan
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_api.validation import complete, validate
from tests.unit.api.manifests import base, patched


def _job(machine: str = "h100", **patch: Any) -> dict[str, Any]:
    changes = {name.replace("__", "."): value for name, value in patch.items()}
    return patched(base(), {"spec.parallelism.planFor": machine, **changes})


def _nodes(count: int) -> dict[str, Any]:
    return {"replicas": count, "image": "trainer:1"}


def _spec(manifest: dict[str, Any]) -> LLMTrainJobSpec:
    return LLMTrainJobSpec.model_validate(complete(manifest)["spec"])


JOBS = {
    "tiny on cpu": _job("cpu"),
    "a batch that the default layout cannot share out": _job("cpu", spec__training__globalBatchSize=2),
    "8B on two nodes": _job(
        "h100", spec__model__preset="llama-8b", spec__workers=_nodes(2), spec__training__globalBatchSize=32
    ),
    "70B on eight": _job(
        "a100", spec__model__preset="llama-70b", spec__workers=_nodes(8), spec__training__globalBatchSize=64
    ),
    "experts": _job(
        "h200", spec__model__preset="mixtral-8x7b", spec__workers=_nodes(4), spec__training__globalBatchSize=64
    ),
}


@pytest.mark.parametrize("manifest", JOBS.values(), ids=JOBS)
def test_the_choice_is_legal_fits_and_is_the_fastest_of_the_plan(manifest: dict[str, Any]) -> None:
    assert validate(manifest) == []
    machine = MACHINES[manifest["spec"]["parallelism"]["planFor"]]
    spec = decided(_spec(manifest))
    by_hand = patched(manifest, {"spec.parallelism": spec.parallelism.to_wire()})
    assert "planFor" not in by_hand["spec"]["parallelism"]
    assert validate(by_hand) == []
    fastest = plan(by_hand, machine, top=5).best
    assert fastest[0].axes == spec.parallelism
    assert fastest[0].fits and fastest[0].memory.total <= machine.rank_memory(spec.ranks_per_worker())
    assert spec == _spec(by_hand), "nothing else is changed"


@pytest.mark.parametrize("manifest", JOBS.values(), ids=JOBS)
def test_the_choice_is_the_same_in_every_process(manifest: dict[str, Any]) -> None:
    first = decided(_spec(manifest))
    decision._answer.cache_clear()
    assert decided(_spec(manifest)) == first


def test_a_spec_without_plan_for_stays_as_it_is() -> None:
    spec = _spec(base())
    assert decided(spec) is spec
    assert layout_problems(base()) == []


def test_a_choice_is_made_once_for_all_that_changes_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(decision, "plan", lambda *given, **more: (asked.append(1), plan(*given, **more))[1])
    decision._answer.cache_clear()
    for patch in ({}, {"spec.suspend": False}, {"spec.failurePolicy.budgets.crash": 1}):
        decided(_spec(patched(_job(), patch)))
    assert len(asked) == 1
    decided(_spec(_job(spec__workers__replicas=4)))
    assert len(asked) == 2


def test_that_nothing_fits_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(decision, "plan", lambda *given, **more: (asked.append(1), plan(*given, **more))[1])
    decision._answer.cache_clear()
    for _ in range(3):
        with pytest.raises(NoLayoutError):
            decided(_spec(_job("cpu", spec__model__preset="llama-8b")))
    assert len(asked) == 1


def test_where_nothing_fits_the_nearest_is_told_and_what_would_help() -> None:
    manifest = _job(
        "h100", spec__model__preset="llama-70b", spec__workers=_nodes(1), spec__training__globalBatchSize=64
    )
    assert validate(manifest) == [], "the API server cannot know"
    [problem] = layout_problems(manifest)
    assert (problem.path, problem.value) == ("spec.parallelism.planFor", "h100")
    found = plan(manifest, MACHINES["h100"], top=1)
    assert found.smallest is not None
    needed = f"needs {found.smallest.memory.total / 1e9:.1f} GB a rank"
    assert str(problem).startswith(
        "spec.parallelism.planFor: no layout fits h100; allowed: 80.4 GB for a rank; the nearest, tensor 8, zeroStage 3"
    )
    assert needed in str(problem)
    assert "; fix: set workers.replicas to " in str(problem)


def test_the_advice_helps() -> None:
    manifest = _job(
        "h100", spec__model__preset="llama-70b", spec__workers=_nodes(1), spec__training__globalBatchSize=64
    )
    [problem] = layout_problems(manifest)
    replicas = int(problem.fix.partition("set workers.replicas to ")[2].split(";")[0])
    assert layout_problems(patched(manifest, {"spec.workers.replicas": replicas})) == []


def test_where_no_layout_is_legal_the_rule_in_the_way_is_told() -> None:
    model = {"preset": "tiny", "layers": 1, "heads": 3, "kvHeads": 3, "dim": 48, "sequenceLength": 63}
    manifest = _job("cpu", spec__model=model, spec__training__globalBatchSize=1)
    assert validate(manifest) == []
    [problem] = layout_problems(manifest)
    assert problem.message == "no layout is legal, on cpu or elsewhere"
    assert "spec.training.globalBatchSize is 1, and allowed: a multiple of 4" in problem.allowed
    assert "use 4, or change" in problem.fix


def test_the_field_names_the_machines_that_the_planner_knows() -> None:
    assert typing.get_args(MachineName) == tuple(MACHINES)
