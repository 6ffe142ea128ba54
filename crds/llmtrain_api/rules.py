"""Every rule that a type alone cannot say, declared once. Tested with one table of manifests in Python, in CEL, and by
a real API server.

An API server asks a rule also where a field it reads breaks its own bounds: no rule may divide by zero then.
"""

from __future__ import annotations

from typing import Any

from llmtrain_api.constants import MAX_NAME_LENGTH
from llmtrain_api.immutability import IMMUTABLE_RULES
from llmtrain_api.rule import Rule, Term
from llmtrain_api.rules_layout import LAYOUT_RULES
from llmtrain_api.rules_model import MODEL_RULES
from llmtrain_api.rules_moe import MOE_RULES
from llmtrain_api.rules_pipeline import PIPELINE_RULES
from llmtrain_api.rules_planned import PLANNED_RULES

RESERVED_ENV_PREFIX = "LLMTRAIN_"

# --- names and addresses ---------------------------------------------------------------------------------------------

_NAME = Rule(
    at="",
    field="metadata.name",
    reads=("metadata.name",),
    cel=f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && !self.metadata.name.contains('.')",
    holds=lambda s: len(s.now["metadata"]["name"]) <= MAX_NAME_LENGTH and "." not in s.now["metadata"]["name"],
    value=Term("self.metadata.name", lambda s: s.now["metadata"]["name"]),
    allowed=f"at most {MAX_NAME_LENGTH} characters and no dot, because pods and host names are made from it",
    fix="choose a shorter name of a-z, 0-9 and '-'",
)


def _stays_in_its_folder(at: str) -> Rule:
    return Rule(
        at=at,
        field="",
        reads=("",),
        cel=r"!self.matches('(^|/)[.][.](/|$)')",
        holds=lambda s: ".." not in s.now.split("/"),
        value=Term("self", lambda s: s.now),
        allowed="a path without '..'",
        fix="write the path in full",
    )


_WARMUP_ENDS = Rule(
    at="spec.training",
    field="schedule.warmupSteps",
    reads=("schedule.warmupSteps", "steps"),
    cel="self.schedule.warmupSteps < self.steps",
    holds=lambda s: s.now["schedule"]["warmupSteps"] < s.now["steps"],
    value=Term("self.schedule.warmupSteps", lambda s: s.now["schedule"]["warmupSteps"]),
    allowed="fewer than training.steps, which is {steps}",
    fix="shorten the warm-up or train longer",
    terms={"steps": Term("self.steps", lambda s: s.now["steps"])},
)
_ONE_PACE = Rule(
    at="spec.checkpoint",
    field="everySeconds",
    reads=("everySeconds", "pace"),
    cel="!has(self.everySeconds) || self.pace == 'fixed'",
    holds=lambda s: "everySeconds" not in s.now or s.now["pace"] == "fixed",
    value=Term("self.everySeconds", lambda s: s.now["everySeconds"]),
    allowed="nothing, because pace auto chooses the interval itself",
    fix="remove it, or set checkpoint.pace to fixed",
)

_SECRET_IS_FOR_S3 = Rule(
    at="spec.checkpoint",
    field="secretName",
    reads=("secretName", "store"),
    cel="self.secretName == '' || self.store.startsWith('s3://')",
    holds=lambda s: s.now["secretName"] == "" or s.now["store"].startswith("s3://"),
    value=Term("self.secretName", lambda s: s.now["secretName"]),
    allowed="nothing, because checkpoint.store is no s3:// address",
    fix="remove it, or keep checkpoints at s3://BUCKET/PATH",
)

# --- the pod template ------------------------------------------------------------------------------------------------


def _reserved_names(spec: Any) -> list[str]:
    """Environment variables of ours that a template sets; content of the wrong shape is none of our business."""
    found = []
    for group in ("containers", "initContainers"):
        for container in spec.get(group) if isinstance(spec.get(group), list) else ():
            entries = container.get("env") if isinstance(container, dict) else None
            for entry in entries if isinstance(entries, list) else ():
                name = entry.get("name") if isinstance(entry, dict) else None
                if isinstance(name, str) and name.startswith(RESERVED_ENV_PREFIX):
                    found.append(name)
    return found


_ENVIRONMENT_IS_OURS = Rule(
    at="spec.workers.template.spec",
    field="",
    reads=("",),
    cel=None,
    holds=lambda s: not _reserved_names(s.now),
    value=Term("", lambda s: "env " + ", ".join(_reserved_names(s.now))),
    allowed=f"environment variables that do not begin with {RESERVED_ENV_PREFIX}, which the operator sets",
    fix="choose another name",
)

RULES: tuple[Rule, ...] = (
    _NAME,
    *MODEL_RULES,
    *LAYOUT_RULES,
    *PIPELINE_RULES,
    *MOE_RULES,
    *PLANNED_RULES,
    _WARMUP_ENDS,
    _ONE_PACE,
    _SECRET_IS_FOR_S3,
    _stays_in_its_folder("spec.checkpoint.store"),
    _stays_in_its_folder("spec.checkpoint.disk.path"),
    _stays_in_its_folder("spec.model.initFrom"),
    _stays_in_its_folder("spec.data.sources[].uri"),
    _stays_in_its_folder("spec.data.tokenizer.uri"),
    _stays_in_its_folder("spec.metrics.tensorboard.uri"),
    _ENVIRONMENT_IS_OURS,
    *IMMUTABLE_RULES,
)
"""All of them, in the order in which they are reported."""
