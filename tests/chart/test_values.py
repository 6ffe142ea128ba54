"""Values: what the schema allows is what values.yaml shows, and a mistake is told at its place."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from tests.chart.conftest import CHART, Helm

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
FREE = {"global"}
"""In the schema alone: Helm adds it to charts inside charts."""


def _keys(values: Any, schema: dict[str, Any], at: str = "") -> set[str]:
    found = set()
    for name, child in schema.get("properties", {}).items():
        path = f"{at}.{name}".strip(".")
        found |= {path, *_keys((values or {}).get(name), child, path)}
    return found


def _written(values: Any, schema: dict[str, Any], at: str = "") -> set[str]:
    found = set()
    for name in values if isinstance(values, dict) and "properties" in schema else ():
        path = f"{at}.{name}".strip(".")
        found |= {path, *_written(values[name], schema["properties"].get(name, {}), path)}
    return found


def test_values_and_schema_name_the_same_fields() -> None:
    assert _keys(VALUES, SCHEMA) - FREE == _written(VALUES, SCHEMA)


def test_the_default_values_pass_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


def test_every_value_is_described_and_no_object_takes_unknown_ones() -> None:
    def check(node: dict[str, Any], at: str) -> None:
        assert node.get("description"), at
        if "properties" in node:
            assert node["additionalProperties"] is False, at
            for name, child in node["properties"].items():
                check(child, f"{at}.{name}")

    check(SCHEMA, "values")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('replicas="two"', "at '/replicas': got string, want integer"),
        ("replicas=0", "at '/replicas': minimum: got 0, want 1"),
        ('image.tga="x"', "at '/image': additional properties 'tga' not allowed"),
        ('operator.logLevel="LOUD"', "at '/operator/logLevel': value must be one of"),
        ('watch.namespaces=["Team_A"]', "at '/watch/namespaces/0': 'Team_A' does not match pattern"),
        ('image.digest="abc"', "at '/image/digest': 'abc' does not match pattern"),
        ('worker.imagePullPolicy="Sometimes"', "at '/worker/imagePullPolicy': value must be one of"),
        ("operator.resyncSeconds=0", "at '/operator/resyncSeconds': minimum: got 0, want 1"),
    ],
)
def test_a_wrong_value_is_refused_at_its_place(helm: Helm, setting: str, message: str) -> None:
    done = helm.run("template", "llmtrain", str(CHART), "--set-json", setting)
    assert done.returncode != 0
    assert message in done.stderr


def test_lint_finds_nothing(helm: Helm) -> None:
    done = helm.run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout and "[ERROR]" not in done.stdout


def test_a_service_account_of_ones_own_needs_a_name(helm: Helm) -> None:
    done = helm.run("template", "llmtrain", str(CHART), "--set", "serviceAccount.create=false")
    assert "serviceAccount.name is needed where serviceAccount.create is false" in done.stderr


def test_the_notes_tell_the_next_steps_and_warn(helm: Helm) -> None:
    settings = (
        "metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true,crds.enabled=false,rbac.create=false"
    )
    done = helm.run(
        "install",
        "llmtrain",
        str(CHART),
        "--dry-run=client",
        "-n",
        "ops",
        "--set",
        settings,
        "--disable-openapi-validation",
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "kubectl -n ops rollout status deployment/llmtrain",
        "kubectl get ltj -A",
        "WARNING",
        "crds.enabled is",
    ):
        assert words in done.stdout
