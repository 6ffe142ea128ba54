"""The Python twin of the API server: every mistake, at the right field, with words that help."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain_api.crdgen import job_schema
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.structural import nodes
from llmtrain_api.validation import PATTERN_WORDS, FieldProblem, rule_problems, validate
from tests.unit.api.cases import ACCEPTED, CASES
from tests.unit.api.manifests import Case, base, patched


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exactly_these_fields_are_blamed(case: Case) -> None:
    problems = validate(case.manifest(), case.old_manifest())
    assert sorted(problem.path for problem in problems) == sorted(case.problems), [str(p) for p in problems]
    said = "\n".join(str(problem) for problem in problems)
    assert [word for word in case.words if word not in said] == [], said


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_what_is_accepted_parses_into_a_job(case: Case) -> None:
    manifest = {key: value for key, value in case.manifest().items() if value is not None}
    manifest["spec"] = _without_nulls(manifest["spec"])
    job = LLMTrainJob.parse(manifest)
    assert rule_problems({"metadata": {"name": job.metadata.name}, "spec": job.spec.to_wire()}) == []


def _without_nulls(value: Any) -> Any:
    return {k: _without_nulls(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def test_all_mistakes_are_shown_at_once() -> None:
    manifest = patched(
        base(),
        {
            "metadata.name": "Case",
            "spec.workers.replica": 2,
            "spec.training.steps": "20",
            "spec.model.preset": "big",
            "spec.training.globalBatchSize": 10,
            "spec.checkpoint.store": "pvc://c/..",
        },
    )
    assert sorted(problem.path for problem in validate(manifest)) == [
        "metadata.name",
        "spec.checkpoint.store",
        "spec.model.preset",
        "spec.training.globalBatchSize",
        "spec.training.steps",
        "spec.workers.replica",
    ]


def test_a_rule_is_silent_where_a_field_it_reads_is_wrong_already() -> None:
    manifest = patched(base(), {"spec.workers.replicas": "two", "spec.training.globalBatchSize": 10})
    assert [problem.path for problem in validate(manifest)] == ["spec.workers.replicas"]


@pytest.mark.parametrize("manifest", [None, [], "job", 3, {}, {"spec": []}, {"metadata": "x", "spec": None}], ids=repr)
def test_nothing_at_all_of_the_right_shape_is_still_only_a_problem(manifest: Any) -> None:
    problems = validate(manifest)
    assert problems
    assert all(isinstance(problem, FieldProblem) and problem.fix for problem in problems)


def test_a_problem_names_field_value_allowed_and_fix_in_one_line() -> None:
    (problem,) = validate(patched(base(), {"spec.training.globalBatchSize": 10}))
    assert (problem.path, problem.value) == ("spec.training.globalBatchSize", 10)
    assert str(problem) == (
        "spec.training.globalBatchSize: 10 is refused; allowed: a multiple of 4 (workers.replicas 2 x 2 ranks "
        "/ tensor x context x pipeline 1 x microBatchSize 1); fix: use 12, or change the number of ranks or "
        "microBatchSize"
    )


def test_rules_are_found_in_a_stored_object_that_an_older_definition_let_pass() -> None:
    assert [p.path for p in rule_problems(patched(base(), {"spec.parallelism.replicate": 3}))] == [
        "spec.parallelism.replicate"
    ]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("training.seed", 2**63, "allowed: an integer, at least 0, at most 9223372036854775807; fix: change the value"),
        ("training.steps", 2**31, "allowed: an integer, at least 1, at most 2147483647; fix"),
        ("workers.image", "a b c", "allowed: a string of 1 to 512 characters, without spaces; fix: write it without s"),
        ("workers.image", "", "allowed: a string of 1 to 512 characters, without spaces; fix: change the value"),
        ("workers.accelerator.resource", "gpu", "253 characters, DOMAIN/NAME, for instance nvidia.com/gpu"),
        ("checkpoint.store", "s3://b", "1024 characters, pvc://CLAIM/PATH, file:///PATH or s3://BUCKET/PATH, without"),
        ("model.initFrom", "s3://b/c", "1024 characters, pvc://CLAIM/PATH or file:///PATH, without spaces; CLAIM: a-z"),
    ],
)
def test_allowed_holds_the_rule_that_refused(field: str, value: Any, said: str) -> None:
    (problem,) = validate(patched(base(), {f"spec.{field}": value}))
    assert problem.path == f"spec.{field}"
    assert said in str(problem)


def test_every_pattern_has_words() -> None:
    found = {node["pattern"] for _, node in nodes(job_schema()["properties"]["spec"]) if "pattern" in node}
    assert found == set(PATTERN_WORDS)
