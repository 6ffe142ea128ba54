"""Both halves of every rule say the same, on every manifest of the table and in every word."""

from __future__ import annotations

from typing import Any

import cel
import pytest

from llmtrain_api.crdgen import job_schema
from llmtrain_api.immutability import IMMUTABLE_RULES, MUTABLE
from llmtrain_api.rule import Rule, Scope, shown
from llmtrain_api.rules import RULES
from llmtrain_api.structural import nodes
from llmtrain_api.validation import complete, scopes
from tests.unit.api.cases import ACCEPTED, BROKEN_RULES, FROZEN
from tests.unit.api.manifests import Case, base

SOUND = (*ACCEPTED, *BROKEN_RULES, *FROZEN)
"""Cases whose types are right: an API server asks its rules about no others."""


def _evaluate(expression: str, scope: Scope) -> Any:
    context = cel.Context(
        variables={"self": scope.now, "oldSelf": scope.before},
        functions={"format": lambda text, values: text.replace("%s", "{}").format(*map(shown, values))},
    )
    return cel.evaluate(expression, context)


def _asked(case: Case) -> list[tuple[Rule, Scope]]:
    old = case.old_manifest()
    before = complete(old) if old else None
    return [
        (rule, scope)
        for rule in RULES
        if before is not None or not rule.transition
        for _, scope in scopes(rule, complete(case.manifest()), before)
    ]


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_cel_and_python_agree(case: Case) -> None:
    asked = [(rule, scope) for rule, scope in _asked(case) if rule.cel]
    assert asked
    for rule, scope in asked:
        assert rule.cel is not None
        assert _evaluate(rule.cel, scope) == rule.holds(scope), (rule.at, rule.field)


@pytest.mark.parametrize("case", (*BROKEN_RULES, *FROZEN), ids=lambda case: case.name)
def test_cel_and_python_say_the_same_words(case: Case) -> None:
    broken = [(rule, scope) for rule, scope in _asked(case) if not rule.holds(scope)]
    assert broken
    for rule, scope in broken:
        if rule.cel:
            assert _evaluate(rule.message_cel(), scope) == rule.message_for(scope)


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if not rule.transition], ids=lambda rule: f"{rule.at} {rule.allowed[:40]}"
)
def test_every_rule_is_broken_by_some_case(rule: Rule) -> None:
    assert any(asked is rule and not rule.holds(scope) for case in BROKEN_RULES for asked, scope in _asked(case))


@pytest.mark.parametrize("rule", IMMUTABLE_RULES, ids=lambda rule: f"{rule.at}.{rule.field}")
def test_a_changed_field_breaks_its_rule_and_no_other_update_rule(rule: Rule) -> None:
    before, now = complete(base()), complete(base())
    node = now
    for step in rule.at.split("."):
        node = node[step]
    old = node.get(rule.field)
    node[rule.field] = {
        int: 99,
        float: 0.5,
        type(None): 3,
        str: "other",
        list: [{"uri": "x"}],
        dict: {"x": 1},
        bool: True,
    }[type(old)]
    broken = [
        other
        for other in IMMUTABLE_RULES
        for _, scope in scopes(other, now, before)
        if not other.holds(scope) and other.cel and not _evaluate(other.cel, scope)
    ]
    assert broken == [rule]


def test_every_field_of_the_spec_is_decided_to_be_mutable_or_immutable() -> None:
    frozen = {f"{rule.at}.{rule.field}" for rule in IMMUTABLE_RULES}
    undecided = []
    for path, node in nodes(job_schema()["properties"]["spec"], "spec"):
        below_decided = any(
            path == decided or path.startswith((f"{decided}.", f"{decided}[")) for decided in frozen | set(MUTABLE)
        )
        if not below_decided and "properties" not in node:
            undecided.append(path)
    assert undecided == []
    assert not frozen & set(MUTABLE)


def test_a_message_escapes_what_cel_would_read_as_its_own() -> None:
    rule = next(rule for rule in RULES if "'..'" in rule.allowed)
    assert _evaluate(rule.message_cel(), Scope("file:///50%/..")).startswith("file:///50%/.. is refused")
