"""Where checkpoints lie, how often they are made and how long they stay: a part of the table in cases.py."""

from __future__ import annotations

from tests.unit.api.manifests import ABSENT, Case

CHECKPOINT_ACCEPTED = (
    Case("dots in names of folders", {"spec.checkpoint.store": "pvc://checkpoints/v1..2/.hidden"}),
    Case("a claim's root as the store", {"spec.checkpoint.store": "pvc://checkpoints"}),
    Case("some checkpoints stay for good", {"spec.checkpoint.everySteps": 10, "spec.checkpoint.keepEverySteps": 25}),
    Case(
        "a store behind S3", {"spec.checkpoint.store": "s3://my.bucket/llama/7b", "spec.checkpoint.secretName": "keys"}
    ),
    Case(
        "tiers before the store",
        {"spec.checkpoint.memory": {"everySteps": 5}, "spec.checkpoint.disk": {"keep": 2, "path": "/scratch/x"}},
    ),
    Case("tiers with nothing but defaults", {"spec.checkpoint.memory": {}, "spec.checkpoint.disk": {}}),
    Case("checkpoints by the clock", {"spec.checkpoint.everySeconds": 600}),
    Case("checkpoints at the best pace", {"spec.checkpoint.pace": "auto", "spec.checkpoint.keepEverySteps": 1000}),
)

CHECKPOINT_MISTYPED = (
    Case("missing section", {"spec.checkpoint": ABSENT}, ("spec.checkpoint",), ("is missing",)),
    Case("none for good", {"spec.checkpoint.keepEverySteps": 0}, ("spec.checkpoint.keepEverySteps",), ("at least 1",)),
    Case("no pause", {"spec.checkpoint.everySeconds": 0}, ("spec.checkpoint.everySeconds",), ("at least 1",)),
    Case("builtin as the store", {"spec.checkpoint.store": "builtin://python-stdlib"}, ("spec.checkpoint.store",), ()),
    Case(
        "scheme of a store",
        {"spec.checkpoint.store": "gs://bucket/x"},
        ("spec.checkpoint.store",),
        ("gs://bucket/x", "s3://BUCKET/PATH"),
    ),
    Case("a whole bucket as the store", {"spec.checkpoint.store": "s3://bucket"}, ("spec.checkpoint.store",), ()),
    Case("weights behind S3", {"spec.model.initFrom": "s3://bucket/x"}, ("spec.model.initFrom",), ()),
    Case("a disk at no folder", {"spec.checkpoint.disk": {"path": "scratch"}}, ("spec.checkpoint.disk.path",), ()),
    Case(
        "memory that keeps none",
        {"spec.checkpoint.memory": {"keep": 0}},
        ("spec.checkpoint.memory.keep",),
        ("at least 1",),
    ),
    Case(
        "root of the file system as the store",
        {"spec.checkpoint.store": "file:///"},
        ("spec.checkpoint.store",),
        ("file:///PATH",),
    ),
)

CHECKPOINT_REFUSED = (
    Case(
        "checkpoints by the clock and at the best pace",
        {"spec.checkpoint.everySeconds": 600, "spec.checkpoint.pace": "auto"},
        ("spec.checkpoint.everySeconds",),
        ("600 is refused", "pace auto chooses", "set checkpoint.pace to fixed"),
    ),
    Case(
        "credentials of a store that needs none",
        {"spec.checkpoint.secretName": "keys"},
        ("spec.checkpoint.secretName",),
        ("keys is refused", "no s3:// address", "remove it"),
    ),
    Case(
        "a disk outside its folder",
        {"spec.checkpoint.disk": {"path": "/scratch/../etc"}},
        ("spec.checkpoint.disk.path",),
        ("without '..'",),
    ),
    Case(
        "store outside its claim",
        {"spec.checkpoint.store": "pvc://checkpoints/../other"},
        ("spec.checkpoint.store",),
        ("pvc://checkpoints/../other is refused", "without '..'"),
    ),
    Case(
        "store that ends in dots",
        {"spec.checkpoint.store": "file:///a/.."},
        ("spec.checkpoint.store",),
        ("without '..'",),
    ),
)
