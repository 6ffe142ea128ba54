"""The pod of a worker: what is in it, and what a user's template makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmtrain_api.constants import Env
from llmtrain_operator.core.actions import CreateWorker
from llmtrain_operator.core.objects import token_secret
from llmtrain_operator.core.overlay import overlay
from llmtrain_operator.core.worker_pod import PodSettings, build_pod, claims
from tests.support.jobs import JobBuilder, make_job

SETTINGS = PodSettings(coordinator_url="http://llmtrain.llmtrain-system:8470")
AWAY = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("n-1", "n-2")]
"""One value each: more are refused."""
ZONE = {"key": "zone", "operator": "In", "values": ["a"]}
BOX = {"key": "metadata.name", "operator": "In", "values": ["n-3"]}


def pod(builder: JobBuilder | None = None, template: Any = None) -> dict[str, Any]:
    builder = builder or make_job()
    if template is not None:
        builder.with_spec(workers={"template": {"spec": template}})
    return build_pod(builder.build(), CreateWorker("demo-w1-a3", 1, 3), SETTINGS)


def trainer(manifest: dict[str, Any]) -> dict[str, Any]:
    found = next(c for c in manifest["spec"]["containers"] if c["name"] == "trainer")
    assert isinstance(found, dict)
    return found


def by_name(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in entries}


def test_the_pod_is_plain_data_and_belongs_to_the_job() -> None:
    manifest = pod()
    assert json.loads(json.dumps(manifest)) == manifest
    owner = manifest["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
        "LLMTrainJob",
        "uid-demo",
        True,
        True,
    )
    assert manifest["metadata"]["labels"]["llmtrain.dev/worker"] == "1"
    assert manifest["metadata"]["labels"]["llmtrain.dev/attempt"] == "3"
    assert manifest["metadata"]["annotations"]["llmtrain.dev/replicas"] == "2"


def test_the_name_of_the_token_secret_is_one_that_no_user_has_taken() -> None:
    job = make_job().build()
    twin = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "another-uid"})})
    names = {token_secret(made, "abc")["metadata"]["name"] for made in (job, twin)}
    assert len(names) == 2
    assert all(name.startswith(f"{job.metadata.name}-token-") for name in names)


def test_the_agent_gets_everything_it_needs() -> None:
    env = by_name(trainer(pod())["env"])
    assert env[Env.COORDINATOR_URL]["value"] == SETTINGS.coordinator_url
    assert env[Env.POD_NAME]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert env[Env.POD_ADDRESS]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert (env[Env.WORKER_INDEX]["value"], env[Env.GRACE_SECONDS]["value"]) == ("1", "60")
    folder, _, key = env[Env.TOKEN_FILE]["value"].rpartition("/")
    secret = token_secret(make_job().build(), "abc")
    assert secret["stringData"] == {key: "abc"}
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-demo"
    mount = next(m for m in trainer(pod())["volumeMounts"] if m["mountPath"] == folder)
    assert by_name(pod()["spec"]["volumes"])[mount["name"]]["secret"]["secretName"] == secret["metadata"]["name"]


def test_the_pod_passes_pod_security_restricted() -> None:
    spec = pod(template={"containers": [{"name": "sidecar", "image": "x"}], "initContainers": [{"name": "i"}]})["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec.get("hostNetwork") and spec["automountServiceAccountToken"] is False
    for container in [*spec["containers"], *spec["initContainers"]]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert trainer({"spec": spec})["securityContext"]["readOnlyRootFilesystem"] is True


def test_every_claim_of_every_address_is_mounted_once() -> None:
    builder = make_job().with_spec(
        data={
            "sources": [{"uri": "pvc://corpus/en"}, {"uri": "pvc://checkpoints/x"}, {"uri": "file:///data"}],
            "tokenizer": {"uri": "pvc://my.tokens/tokenizer.json"},
        },
        model={"initFrom": "pvc://weights/llama"},
        metrics={"tensorboard": {"uri": "pvc://boards/case"}},
    )
    assert claims(builder.build().spec) == ["boards", "checkpoints", "corpus", "my.tokens", "weights"]
    paths = [mount["mountPath"] for mount in trainer(pod(builder))["volumeMounts"]]
    assert [path for path in paths if path.startswith("/mnt")] == [
        "/mnt/llmtrain/boards",
        "/mnt/llmtrain/checkpoints",
        "/mnt/llmtrain/corpus",
        "/mnt/llmtrain/my.tokens",
        "/mnt/llmtrain/weights",
    ]


@pytest.mark.parametrize(
    ("accelerator", "limits"),
    [
        pytest.param({"resource": "nvidia.com/gpu", "count": 8}, {"nvidia.com/gpu": "8"}, id="eight GPUs"),
        pytest.param({"count": 0}, None, id="CPU only"),
    ],
)
def test_the_accelerator_is_asked_for(accelerator: dict[str, Any], limits: dict[str, str] | None) -> None:
    resources = trainer(pod(make_job().with_spec(workers={"accelerator": accelerator}))).get("resources")
    assert (resources or {}).get("limits") == limits


def test_the_port_of_metrics_is_named_for_who_scrapes() -> None:
    builder = make_job().with_spec(metrics={"prometheus": {"port": 9400}})
    assert trainer(pod(builder))["ports"] == [{"name": "metrics", "containerPort": 9400}]
    assert "ports" not in trainer(pod())


def test_the_termination_grace_covers_the_ranks_grace() -> None:
    assert pod(make_job().with_deadlines(stopSeconds=120))["spec"]["terminationGracePeriodSeconds"] == 130


def test_the_users_template_wins_and_the_rest_stays() -> None:
    manifest = pod(
        template={
            "nodeSelector": {"pool": "gpu"},
            "securityContext": {"runAsUser": 1000},
            "volumes": [
                {"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}},
                {"name": "tmp", "hostPath": {"path": "/x"}},
            ],
            "containers": [
                {
                    "name": "trainer",
                    "resources": {"limits": {"memory": "64Gi"}},
                    "env": [{"name": "HOME", "value": "/home/me"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
                    "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
                }
            ],
        }
    )
    spec, container = manifest["spec"], trainer(manifest)
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (1000, True)
    volumes = by_name(spec["volumes"])
    assert volumes["shm"] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    assert volumes["tmp"] == {"name": "tmp", "hostPath": {"path": "/x"}}
    env = by_name(container["env"])
    assert (env["HOME"]["value"], env["NCCL_DEBUG"]["value"]) == ("/home/me", "INFO")
    assert Env.COORDINATOR_URL in env and container["command"] == ["llmtrain-agent"]
    assert {m["mountPath"]: m["name"] for m in container["volumeMounts"]}["/tmp"] == "scratch"
    assert container["resources"]["limits"] == {"memory": "64Gi"}


@pytest.mark.parametrize(
    "template",
    [
        {"containers": "trainer"},
        {"containers": ["trainer", 3, None]},
        {"containers": [{"name": "trainer", "env": {"HOME": "/"}, "securityContext": "none"}]},
        {"volumes": [{"name": []}, {}], "securityContext": 7},
        {"initContainers": {"name": "x"}, "affinity": None},
    ],
    ids=["text", "list of anything", "wrong types inside", "odd volumes", "odd more"],
)
def test_nonsense_in_the_template_is_left_for_the_api_server_to_refuse(template: dict[str, Any]) -> None:
    assert pod(template=template)["metadata"]["name"] == "demo-w1-a3"


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        pytest.param({"a": 1}, {"b": 2}, {"a": 1, "b": 2}, id="new field"),
        pytest.param({"a": {"x": 1}}, {"a": {"y": 2}}, {"a": {"x": 1, "y": 2}}, id="nested"),
        pytest.param({"a": 1, "b": 2}, {"a": None}, {"b": 2}, id="null removes"),
        pytest.param({"tolerations": [1]}, {"tolerations": [2]}, {"tolerations": [2]}, id="list without a key"),
        pytest.param(
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]},
            id="another source replaces",
        ),
    ],
)
def test_overlay(base: dict[str, Any], patch: dict[str, Any], merged: dict[str, Any]) -> None:
    before = json.dumps([base, patch])
    assert overlay(base, patch) == merged
    assert json.dumps([base, patch]) == before, "neither input is changed"


def test_credentials_of_the_store_come_from_its_secret() -> None:
    assert "envFrom" not in trainer(pod())
    manifest = pod(make_job().with_spec(checkpoint={"store": "s3://bucket/x", "secretName": "keys"}))
    assert trainer(manifest)["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert not [volume for volume in manifest["spec"]["volumes"] if "persistentVolumeClaim" in volume]


@pytest.mark.parametrize(
    ("given", "terms"),
    [
        pytest.param({}, [{"matchFields": AWAY}], id="nothing of the user's"),
        pytest.param(
            {"nodeSelectorTerms": [{"matchExpressions": [ZONE]}, {"matchFields": [BOX]}]},
            [{"matchExpressions": [ZONE], "matchFields": AWAY}, {"matchFields": [BOX, *AWAY]}],
            id="every alternative of the user's",
        ),
    ],
)
def test_nodes_to_keep_away_from_are_ruled_out_beside_what_the_user_asks_for(
    given: dict[str, Any], terms: list[Any]
) -> None:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": given} if given else {}
    template = {"spec": {"affinity": {"nodeAffinity": required}}} if given else {"spec": {}}
    job = make_job().with_spec(workers={"template": template}).build()
    pod = build_pod(job, CreateWorker("demo-w0-a1", 0, 1, ("n-1", "n-2")), SETTINGS)
    affinity = pod["spec"]["affinity"]
    assert affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == terms
    assert "podAntiAffinity" in affinity
    assert pod["metadata"]["annotations"]["llmtrain.dev/avoids"] == "n-1 n-2"
