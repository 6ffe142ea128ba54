"""What the chart makes: valid objects in every combination, restricted pods, and settings that the operator reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain_api.constants import COORDINATOR_PORT, CRD_NAME, METRICS_PORT
from llmtrain_api.crdgen import crd
from llmtrain_operator.core.observed import Policy
from llmtrain_operator.runtime.settings import OperatorSettings, parse_settings
from tests.chart.conftest import CHART, NAMESPACE, Helm, Render, one
from tests.support.pod_security import violations

DIGEST = "sha256:" + "0" * 64
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("replicas=1", "replicas=3"),
    ("crds.enabled=true", "crds.enabled=false", "crds.keep=false"),
    ("watch.namespaces=[]", 'watch.namespaces=["a","b"]'),
    ("rbac.create=true", "rbac.create=false", "rbac.aggregate=false"),
    ('key.existingSecret=""', 'key.existingSecret="mine"'),
)
EVERYTHING = (
    f'image={{"repository":"registry.example/op","digest":"{DIGEST}","pullSecrets":["pull"]}}',
    'serviceAccount={"create":false,"name":"mine"}',
    'service.annotations={"a":"b"}',
    "metrics.serviceMonitor.enabled=true",
    'metrics.prometheusRule={"enabled":true,"labels":{"release":"prometheus"}}',
    'metrics.podMonitor={"enabled":true,"labels":{"release":"prometheus"}}',
    'podAnnotations={"a":"b"}',
    'podLabels={"team":"ml"}',
    'nodeSelector={"pool":"system"}',
    'tolerations=[{"operator":"Exists"}]',
    'affinity={"nodeAffinity":{}}',
    'topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"ScheduleAnyway"}]',
    'priorityClassName="system-cluster-critical"',
    'fullnameOverride="trainer-operator"',
)


def _pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = one(objects, "Deployment")["spec"]["template"]["spec"]
    return pod


def _check_shape(objects: list[dict[str, Any]]) -> None:
    """What an API server asks of every object: a name of its own, texts as labels, a namespace where it needs one."""
    seen = set()
    for item in objects:
        identity = (item["apiVersion"], item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
        assert identity not in seen
        seen.add(identity)
        for values in (item["metadata"].get("labels", {}), item["metadata"].get("annotations", {})):
            assert all(isinstance(value, str) for value in values.values()), identity
        cluster_wide = item["kind"].startswith("Cluster") or item["kind"] == "CustomResourceDefinition"
        assert ("namespace" in item["metadata"]) != cluster_wide, identity
        assert "app.kubernetes.io/instance" in item["metadata"]["labels"], identity


@pytest.mark.parametrize("combination", list(itertools.product(*OPTIONS)), ids=" ".join)
def test_every_combination_renders_sound_objects(render: Render, combination: tuple[str, ...]) -> None:
    objects = render(*combination)
    _check_shape(objects)
    assert violations(_pod(objects)) == []
    kinds = {item["kind"] for item in objects}
    assert ("PodDisruptionBudget" in kinds) == ("replicas=3" in combination)
    assert ("CustomResourceDefinition" in kinds) == ("crds.enabled=false" not in combination)
    assert ("Secret" in kinds) == ('key.existingSecret=""' in combination)


def test_all_other_values_at_once_reach_the_pod(render: Render) -> None:
    objects = render(*EVERYTHING)
    _check_shape(objects)
    pod = _pod(objects)
    assert violations(pod) == []
    assert pod["containers"][0]["image"] == f"registry.example/op@{DIGEST}"
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["serviceAccountName"] == "mine"
    assert pod["priorityClassName"] == "system-cluster-critical"
    assert pod["nodeSelector"] == {"pool": "system"}
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["affinity"] == {"nodeAffinity": {}}
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "zone"
    template = one(objects, "Deployment")["spec"]["template"]["metadata"]
    assert (template["labels"]["team"], template["annotations"]["a"]) == ("ml", "b")
    assert one(objects, "Service")["metadata"]["annotations"] == {"a": "b"}
    assert one(objects, "PodMonitor")["metadata"]["labels"]["release"] == "prometheus"
    assert {item["kind"] for item in objects} >= {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def test_the_operator_reads_every_setting(render: Render) -> None:
    """The variables of the pod are flags of llmtrain-operator, and each value arrives."""
    objects = render(
        'watch.namespaces=["b","a"]',
        'worker.imagePullPolicy="Never"',
        "service.coordinatorPort=9000",
        'operator={"logFormat":"text","logLevel":"DEBUG","workers":3,"resyncSeconds":60,"leaseDurationSeconds":9,'
        '"statusPeriodSeconds":12,"settleSeconds":0.25,"agentLostSeconds":77,"acceleratorHourPrice":2.5,'
        '"jobMetrics":true}',
    )
    environment = {entry["name"]: entry.get("value", "") for entry in _pod(objects)["containers"][0]["env"]}
    environment |= {"POD_NAME": "llmtrain-0", "POD_NAMESPACE": NAMESPACE}
    assert parse_settings([], environment) == OperatorSettings(
        coordinator_url=f"http://llmtrain.{NAMESPACE}:9000",
        key_file=Path("/var/run/secrets/llmtrain.dev/key"),
        namespaces=("a", "b"),
        lease_name="llmtrain",
        lease_namespace=NAMESPACE,
        identity="llmtrain-0",
        workers=3,
        resync_seconds=60,
        lease_duration_seconds=9,
        image_pull_policy="Never",
        log_format="text",
        log_level="DEBUG",
        job_metrics=True,
        policy=Policy(status_period_seconds=12, settle_seconds=0.25, agent_lost_seconds=77, accelerator_hour_price=2.5),
    )
    known = {f"LLMTRAIN_OPERATOR_{name.upper()}" for name in _setting_names()}
    assert {name for name in environment if name.startswith("LLMTRAIN_")} <= known


def _setting_names() -> set[str]:
    fields = set(OperatorSettings.__dataclass_fields__) | set(Policy.__dataclass_fields__)
    return fields - {"policy"}


def test_the_default_settings_are_the_operators_own(render: Render) -> None:
    entries = _pod(render())["containers"][0]["env"]
    environment = {entry["name"]: entry.get("value", "") for entry in entries} | {"POD_NAME": "x"}
    settings = parse_settings([], environment | {"POD_NAMESPACE": NAMESPACE})
    plain = OperatorSettings(
        coordinator_url=settings.coordinator_url,
        key_file=settings.key_file,
        lease_name="llmtrain",
        lease_namespace=NAMESPACE,
        identity="x",
    )
    assert settings == plain


def test_ports_and_probes_meet_those_of_the_operator(render: Render) -> None:
    objects = render()
    container = _pod(objects)["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"coordinator": COORDINATOR_PORT, "metrics": METRICS_PORT}
    assert {port["targetPort"] for port in one(objects, "Service")["spec"]["ports"]} == set(ports)
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {"metrics"}
    annotations = one(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(METRICS_PORT)


def test_the_root_file_system_is_read_only_and_tmp_is_not(render: Render) -> None:
    pod = _pod(render())
    container = pod["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["tmp"] == "/tmp"
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)


def test_a_made_key_is_long_random_and_restarts_the_pods_when_it_changes(render: Render) -> None:
    first, second = render(), render()
    keys = [one(objects, "Secret")["data"]["key"] for objects in (first, second)]
    sums = [
        one(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/key"]
        for objects in (first, second)
    ]
    assert keys[0] != keys[1] and sums[0] != sums[1]
    assert all(len(key) >= 64 for key in keys)


def test_an_existing_key_is_mounted_and_none_is_made(render: Render) -> None:
    pod = _pod(render('key.existingSecret="mine"'))
    assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == ["mine"]


@pytest.mark.parametrize(
    ("settings", "annotations"),
    [((), {"helm.sh/resource-policy": "keep"}), (("crds.keep=false",), None)],
    ids=["kept", "not kept"],
)
def test_the_definition_is_the_generated_one(render: Render, settings: tuple[str, ...], annotations: Any) -> None:
    definition = one(render(*settings), "CustomResourceDefinition", CRD_NAME)
    assert definition["spec"] == crd()["spec"]
    assert definition["metadata"].get("annotations") == annotations


def test_the_operators_image_is_the_charts_version(render: Render) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert _pod(render())["containers"][0]["image"] == f"llmtrain-operator:{version}"


@pytest.mark.parametrize(
    ("release", "name"), [("llmtrain", "llmtrain"), ("prod", "prod-llmtrain"), ("my-llmtrain", "my-llmtrain")]
)
def test_objects_are_named_after_the_release(helm: Helm, release: str, name: str) -> None:
    objects = helm.template(release=release)
    assert one(objects, "Deployment")["metadata"]["name"] == name
    assert one(objects, "Service")["metadata"]["name"] == name
