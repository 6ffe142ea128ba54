"""Rules of one's own, budgets: a part of the table in cases.py."""

from __future__ import annotations

from tests.unit.api.manifests import Case

RULES = "spec.failurePolicy.rules"

FAILURE_ACCEPTED = (
    Case(
        "rules of one's own",
        {
            RULES: [
                {"onExitCodes": [1, 137, 255], "onWorkers": [0], "action": "FailJob"},
                {"onClasses": ["Hang", "NodeLost"], "messageContains": "CUDA error", "action": "ReplaceNode"},
                {"action": "Ignore"},
            ]
        },
    ),
    Case(
        "slow ranks replaced", {"spec.failurePolicy": {"straggler": {"slowdownPercent": 30, "action": "ReplaceNode"}}}
    ),
)

FAILURE_MISTYPED = (
    Case(
        "slowness that is noise",
        {"spec.failurePolicy": {"straggler": {"slowdownPercent": 5}}},
        ("spec.failurePolicy.straggler.slowdownPercent",),
        ("at least 10",),
    ),
    Case("a rule without an action", {RULES: [{"onExitCodes": [1]}]}, (f"{RULES}[0].action",), ("is missing",)),
    Case(
        "an exit code of success",
        {RULES: [{"onExitCodes": [0], "action": "Ignore"}]},
        (f"{RULES}[0].onExitCodes[0]",),
        ("at least 1",),
    ),
    Case("an action that is none", {RULES: [{"action": "Reboot"}]}, (f"{RULES}[0].action",), ("Reboot",)),
    Case(
        "a class that is none",
        {RULES: [{"onClasses": ["Gremlins"], "action": "Ignore"}]},
        (f"{RULES}[0].onClasses[0]",),
        ("Gremlins",),
    ),
)
