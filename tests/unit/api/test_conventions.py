"""Kubernetes API conventions, as kube-api-linter asks for them, on the schema that users meet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from llmtrain_api.crdgen import MAX_CRD_BYTES, crd, to_yaml
from llmtrain_api.structural import PRESERVE, Schema, nodes

FLOATS = {
    "spec.training.optimizer.learningRate": "6e-5 is what papers and people write; no integer of any unit reads well",
    "spec.training.optimizer.momentum": "a ratio of the algorithm, as in the paper",
    "spec.training.optimizer.beta1": "a ratio of the algorithm, as in the paper",
    "spec.training.optimizer.beta2": "a ratio of the algorithm, as in the paper",
    "spec.training.optimizer.epsilon": "as in the paper; spans ten orders of magnitude",
    "spec.training.optimizer.weightDecay": "a ratio of the algorithm, as in the paper",
    "spec.training.optimizer.gradientClipNorm": "a norm, as in every training script",
    "spec.training.schedule.minLearningRateRatio": "a ratio",
    "spec.training.schedule.decayFraction": "a ratio",
    "spec.training.skipping.spikeSigmas": "a multiple of a standard deviation",
    "spec.model.ropeTheta": "as in config.json of published weights; one of them may be a fraction",
    "spec.model.normEpsilon": "as in config.json of published weights; spans orders of magnitude",
    "spec.model.moe.capacityFactor": "a ratio, as in the papers",
    "spec.model.moe.balanceCoefficient": "a weight of a loss, as in the papers",
    "spec.model.moe.zCoefficient": "a weight of a loss, as in the papers",
    "spec.model.moe.biasRate": "a step, as in the paper",
}
"""The only fields that hold fractions, and why: they are the trainer's, and no controller compares or rounds them."""
OPEN = re.compile(r"spec\.workers\.template\.spec\.\w+")
"""Content that is a PodSpec's; the API server checks it when the pod is made."""


def _version() -> dict[str, Any]:
    version: dict[str, Any] = crd()["spec"]["versions"][0]
    return version


ROOT: Schema = _version()["schema"]["openAPIV3Schema"]
FIELDS = [(path, node) for path, node in nodes(ROOT) if path != "metadata"]


def _typed() -> Iterator[tuple[str, Schema]]:
    return ((path, node) for path, node in FIELDS if not OPEN.fullmatch(path))


def test_every_field_is_described() -> None:
    assert [path for path, node in FIELDS if not node.get("description") and not path.endswith(("[]", ".*"))] == []


def test_names_are_camel_case_and_none_is_called_phase() -> None:
    names = {re.sub(r"(\[\]|\.\*)$", "", path).rpartition(".")[2] for path, _ in FIELDS}
    assert [name for name in names if not re.fullmatch(r"[a-z][a-zA-Z0-9]*", name)] == []
    assert "phase" not in names


def test_durations_carry_their_unit() -> None:
    timed = [
        path for path, _ in FIELDS if re.search(r"(timeout|deadline|period|interval|duration)$", path, re.IGNORECASE)
    ]
    assert timed == []


def test_every_field_has_one_type() -> None:
    assert [path for path, node in _typed() if not isinstance(node.get("type"), str)] == []


def test_open_content_is_only_in_the_pod_template() -> None:
    assert [path for path, node in FIELDS if node.get(PRESERVE) and not OPEN.fullmatch(path)] == []


def test_integers_are_32_or_64_bits_wide() -> None:
    integers = [(path, node) for path, node in _typed() if node["type"] == "integer"]
    assert integers
    assert [path for path, node in integers if node.get("format") not in ("int32", "int64")] == []


def test_fractions_are_only_where_a_reason_is_given() -> None:
    assert {path for path, node in _typed() if node["type"] == "number"} == set(FLOATS)


def test_strings_lists_and_maps_are_bounded() -> None:
    unbounded = [
        path
        for path, node in _typed()
        if (
            node["type"] == "string"
            and "maxLength" not in node
            and "enum" not in node
            and path not in ("apiVersion", "kind")
        )
        or (node["type"] == "array" and "maxItems" not in node)
        or ("additionalProperties" in node and "maxProperties" not in node)
    ]
    assert unbounded == []


def test_times_are_rfc_3339() -> None:
    times = [(path, node) for path, node in _typed() if path.endswith(("Time", "At")) or path.endswith(".at")]
    assert times
    assert [path for path, node in times if node.get("format") != "date-time"] == []


@pytest.mark.parametrize("word", ["nullable", "oneOf", "anyOf", "allOf", "not", "$ref", "title", "const"])
def test_the_schema_is_structural(word: str) -> None:
    assert [path for path, node in [("", ROOT), *FIELDS] if word in node] == []


def test_maps_hold_plain_values() -> None:
    assert [path for path, node in FIELDS if node.get("additionalProperties", {}).get("type") == "object"] == []


def test_lists_say_how_they_merge() -> None:
    lists = [(path, node) for path, node in _typed() if node["type"] == "array"]
    assert lists
    assert [path for path, node in lists if node.get("x-kubernetes-list-type") not in ("map", "set", "atomic")] == []


def test_keys_of_a_list_are_required() -> None:
    for path, node in _typed():
        for key in node.get("x-kubernetes-list-map-keys", ()):
            assert key in node["items"].get("required", ()), f"{path}: {key}"


def test_a_default_is_never_on_a_required_field_or_in_the_status() -> None:
    parents = dict([("", ROOT), *FIELDS])
    for path, node in FIELDS:
        if "default" in node:
            parent, _, name = path.rpartition(".")
            assert name not in parents[parent].get("required", ()), path
            assert not path.startswith("status"), path


def test_the_status_is_optional_and_begins_with_conditions() -> None:
    status = ROOT["properties"]["status"]
    assert "status" not in ROOT["required"]
    assert "required" not in status
    assert next(iter(status["properties"])) == "conditions"
    assert status["properties"]["conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_a_condition_has_the_fields_of_a_metav1_condition() -> None:
    item = ROOT["properties"]["status"]["properties"]["conditions"]["items"]
    assert set(item["properties"]) == {
        "type",
        "status",
        "observedGeneration",
        "lastTransitionTime",
        "reason",
        "message",
    }
    assert item["properties"]["status"]["enum"] == ["True", "False", "Unknown"]
    assert item["properties"]["message"]["maxLength"] == 32768


def test_status_and_scale_are_subresources() -> None:
    subresources = _version()["subresources"]
    assert subresources["status"] == {}
    paths = {"." + path: node for path, node in FIELDS}
    assert {paths[path]["type"] for path in subresources["scale"].values()} == {"integer", "string"}


def test_columns_read_from_the_left_and_do_not_depend_on_the_order_of_a_list() -> None:
    columns = _version()["additionalPrinterColumns"]
    assert [column["name"] for column in columns if not column.get("priority")] == [
        "State",
        "Workers",
        "Step",
        "Of",
        "Loss",
        "Restarts",
        "Age",
    ]
    assert [column["name"] for column in columns if "[" in column["jsonPath"]] == []


def test_names_people_type() -> None:
    names = crd()["spec"]["names"]
    assert (names["shortNames"], names["categories"], names["singular"]) == (["ltj"], ["llmtrain"], "llmtrainjob")


def test_every_rule_has_a_message_with_values_and_one_without() -> None:
    rules = [rule for _, node in [("", ROOT), *FIELDS] for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 40
    for rule in rules:
        assert "allowed:" in rule["message"] and "fix:" in rule["message"]
        assert ".format([" in rule["messageExpression"]
        assert len(rule["messageExpression"]) <= 5120
        assert "\n" not in rule["message"]


def test_the_definition_fits_into_the_annotation_of_kubectl_apply() -> None:
    # kubectl keeps the whole definition in an annotation, as JSON without spaces: half of the room stays free.
    assert len(json.dumps(crd(), separators=(",", ":")).encode()) < MAX_CRD_BYTES / 2


def test_generation_gives_the_same_text_each_time() -> None:
    assert to_yaml(crd()) == to_yaml(crd())
