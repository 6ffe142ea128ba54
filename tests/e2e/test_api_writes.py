"""What the operator writes, asked of the real API server: a refused write leaves a job alone until its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from llmtrain_api.constants import API_VERSION, KIND
from llmtrain_kind.driver import Driver
from llmtrain_operator.core.actions import CreateWorker
from llmtrain_operator.core.worker_pod import PodSettings, build_pod
from llmtrain_operator.kube.client import DeleteOptions, KubeClient, load_configuration
from llmtrain_operator.kube.resources import JOBS
from tests.support.jobs import make_job

pytestmark = pytest.mark.cluster

NAMESPACE = "default"
ON_SOME = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n-9"]}]}]}
ON_LABELS = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]}


@pytest.fixture(scope="module")
def kube(cluster: Driver) -> Iterator[KubeClient]:
    made = KubeClient(load_configuration(cluster.kubeconfig))
    yield made
    made.close()


@pytest.mark.parametrize("avoided", [0, 1, 2, 5], ids=lambda count: f"{count} avoided nodes")
@pytest.mark.parametrize("given", [None, ON_SOME, ON_LABELS], ids=["plain", "fields", "labels"])
def test_a_workers_pod_is_accepted(cluster: Driver, avoided: int, given: dict[str, Any] | None) -> None:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": given}
    template = {"spec": {"affinity": {"nodeAffinity": required}}} if given else {}
    job = make_job().with_spec(workers={"template": template}).build()
    away = tuple(f"node-{number}" for number in range(avoided))
    pod = build_pod(job, CreateWorker("demo-w0-a1", 0, 1, away), PodSettings("http://llmtrain.llmtrain-system:8470"))
    pod["metadata"] |= {"namespace": NAMESPACE}
    api = client.CoreV1Api(config.new_client_from_config(cluster.kubeconfig))
    made = api.create_namespaced_pod(NAMESPACE, pod, dry_run="All", field_validation="Strict")
    assert made.metadata.name == "demo-w0-a1"


def test_a_status_may_quote_any_text(kube: KubeClient) -> None:
    """A program's last words, with all that YAML, which the API server reads an apply as, has trouble with."""
    message = (
        "out of luck \U0001f600 \x1b[31mred\x1b[0m \x7f \x85 \u2028 \ufeff \ufffe "
        '"quoted" \\ud83d \\ - a: b # c caf\udce9'
    )
    metadata = {"name": "awkward-words", "namespace": NAMESPACE}
    manifest = make_job().with_spec(managedBy="example.com/nobody").manifest() | {"metadata": metadata}
    manifest.pop("status", None)

    async def scenario() -> dict[str, Any]:
        await kube.create(JOBS, manifest)
        try:
            status = {"state": "Training", "message": message}
            body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status}
            return await kube.apply(JOBS, body, subresource="status")
        finally:
            await kube.delete(JOBS, NAMESPACE, metadata["name"], DeleteOptions())

    stored = asyncio.run(scenario())
    assert stored["status"]["message"] == message.replace("\udce9", "\ufffd")
