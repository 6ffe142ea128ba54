"""Rules about a layout that the planner chooses: what it chooses is not chosen by hand as well."""

from __future__ import annotations

from typing import Any

from llmtrain_api.rule import Rule, Term, cel_string
from llmtrain_api.spec import Parallelism


def _left_out(name: str, default: Any) -> Rule:
    """Return the rule that a field has its default, which is the same as leaving it out, beside planFor."""
    written = cel_string(default) if isinstance(default, str) else str(default)
    return Rule(
        at="spec.parallelism",
        field=name,
        reads=(name, "planFor"),
        cel=f"!has(self.planFor) || self.{name} == {written}",
        holds=lambda s: "planFor" not in s.now or s.now[name] == default,
        value=Term(f"self.{name}", lambda s: s.now[name]),
        allowed=f"nothing, or its default {default}: with parallelism.planFor {{machine}} the planner chooses it",
        fix=f"leave parallelism.{name} out, or leave planFor out",
        terms={"machine": Term("self.planFor", lambda s: s.now["planFor"])},
    )


PLANNED_RULES: tuple[Rule, ...] = tuple(
    _left_out(str(field.alias), field.default) for name, field in Parallelism.model_fields.items() if name != "plan_for"
)
