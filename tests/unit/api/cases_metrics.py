"""Who is told about each step: a part of the table in cases.py."""

from __future__ import annotations

from tests.unit.api.manifests import Case

TENSORBOARD = {"spec.metrics": {"tensorboard": {"uri": "pvc://boards/case"}}}

METRICS_ACCEPTED = (
    Case("event files on a claim", TENSORBOARD),
    Case("a project of one's own", {"spec.metrics": {"wandb": {"project": "llama"}}}),
    Case("a team's project, offline", {"spec.metrics.wandb": {"project": "a.b-c", "entity": "lab", "mode": "offline"}}),
    Case("an endpoint for Prometheus", {"spec.metrics": {"prometheus": {"port": 9400}}}),
    Case("nobody, spelt out", {"spec.metrics": {}}, old={}),
)

METRICS_MISTYPED = (
    Case(
        "event files without a place",
        {"spec.metrics.tensorboard": {}},
        ("spec.metrics.tensorboard.uri",),
        ("is missing",),
    ),
    Case(
        "event files elsewhere",
        {"spec.metrics.tensorboard": {"uri": "s3://b/x"}},
        ("spec.metrics.tensorboard.uri",),
        ("s3://b/x", "pvc://CLAIM/PATH"),
    ),
    Case("no project", {"spec.metrics.wandb": {"entity": "lab"}}, ("spec.metrics.wandb.project",), ("is missing",)),
    Case(
        "a project with its team",
        {"spec.metrics.wandb": {"project": "lab/llama"}},
        ("spec.metrics.wandb.project",),
        ("lab/llama", "without spaces and / "),
    ),
    Case(
        "a mode that wandb has and we have not",
        {"spec.metrics.wandb": {"project": "llama", "mode": "disabled"}},
        ("spec.metrics.wandb.mode",),
        ("disabled", "online or offline"),
    ),
    Case(
        "a port of the system",
        {"spec.metrics.prometheus": {"port": 80}},
        ("spec.metrics.prometheus.port",),
        ("80", "at least 1024", "at most 65535"),
    ),
    Case("no port", {"spec.metrics.prometheus": {}}, ("spec.metrics.prometheus.port",), ("is missing",)),
)

METRICS_REFUSED = (
    Case(
        "event files outside their claim",
        {"spec.metrics.tensorboard": {"uri": "pvc://c/../d"}},
        ("spec.metrics.tensorboard.uri",),
        ("pvc://c/../d is refused", "without '..'"),
    ),
)
