"""The table of manifests, asked of the real API server: it accepts and refuses the same as the Python twin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from llmtrain_api.constants import GROUP, PLURAL, VERSION, Action, ConditionType, FailureClass, State
from llmtrain_api.manifest_io import load_documents
from llmtrain_api.status import (
    CheckpointStatus,
    Condition,
    FailureStatus,
    LLMTrainJobStatus,
    ProgressStatus,
    RestartsStatus,
    Shape,
    WorkersStatus,
)
from llmtrain_api.validation import complete
from llmtrain_kind.driver import REPOSITORY, Driver
from tests.unit.api.cases import ACCEPTED, CASES
from tests.unit.api.manifests import Case

pytestmark = pytest.mark.cluster

NAMESPACE = "default"
BESIDE_THE_POINT = ("some validation rules were not checked", "Checked value must be of type integer")
"""Said beside the error that names the field."""
CHECKED = [case for case in CASES if not case.python_only]

NOW = "2026-11-30T21:24:53.125Z"
FULL_STATUS = LLMTrainJobStatus(
    conditions=[
        Condition(type=kind, status="True", observed_generation=1, last_transition_time=NOW, reason="Why", message="m")
        for kind in ConditionType
    ],
    state=State.TRAINING,
    message="step 3 of 20",
    observed_generation=1,
    attempt=2,
    started_attempt=2,
    attempt_started_at=NOW,
    start_time=NOW,
    completion_time=NOW,
    shape=Shape(
        world_size=4,
        replicate=1,
        shard=2,
        tensor=2,
        context=1,
        zero_stage=3,
        pipeline_schedule="1F1B",
        recompute="none",
    ),
    workers=WorkersStatus(desired=2, ready=2, summary="2/2", selector="llmtrain.dev/job=case"),
    progress=ProgressStatus(
        step=3, steps=20, tokens="1536", loss="5.5", tokens_per_second="1000", eta_seconds=9, updated_at=NOW
    ),
    checkpoint=CheckpointStatus(last_good_step=-1, uri="pvc://c/x", committed_at=NOW, skipped="step 2: torn"),
    restarts=RestartsStatus(
        total=1, by_class={"Crash": 1}, since_progress={"Crash": 1}, by_worker_since_progress={"0": 1}
    ),
    failures=[
        FailureStatus(
            at=NOW,
            attempt=1,
            failure_class=kind,
            worker=0,
            pod="case-w0-a1",
            node="node-1",
            rank=0,
            message="exit 1",
            action=Action.RESTART_RANKS,
            step=2,
            lost_steps=1,
            seconds_to_next_step="0.8",
        )
        for kind in FailureClass
    ],
)


class Server:
    """The API server, asked as kubectl asks: unknown fields are errors, and nothing is kept."""

    def __init__(self, kubeconfig: str) -> None:
        self._client = config.new_client_from_config(kubeconfig)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """Return the answer, which may be a Status that tells of a failure."""
        try:
            answer = self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Content-Type": "application/json", "Accept": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
            )
            return dict(json.loads(answer[0].data))
        except client.ApiException as error:
            return dict(json.loads(error.body or "{}"))

    def create(self, manifest: dict[str, Any], dry_run: bool = True) -> dict[str, Any]:
        query = {"dryRun": "All"} if dry_run else {}
        return self.call("POST", _path(NAMESPACE), _as_kubectl_sends(manifest), fieldValidation="Strict", **query)

    def update(self, manifest: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
        identity = {name: stored["metadata"][name] for name in ("name", "resourceVersion", "uid")}
        body = {**_as_kubectl_sends(manifest), "metadata": {**manifest["metadata"], **identity}}
        return self.call("PUT", f"{_path(NAMESPACE)}/{identity['name']}", body, fieldValidation="Strict", dryRun="All")


def _path(namespace: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"


def _as_kubectl_sends(value: Any) -> Any:
    """kubectl turns YAML into JSON by Go's rules: 20.0 becomes 20."""
    if isinstance(value, dict):
        return {name: _as_kubectl_sends(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_as_kubectl_sends(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.fixture(scope="module")
def server(cluster: Driver) -> Server:
    return Server(cluster.kubeconfig)


@pytest.fixture(scope="module")
def stored(server: Server) -> Iterator[dict[str, dict[str, Any]]]:
    """Case name to the object that its update begins from. Their managedBy makes every operator leave them alone."""
    found: dict[str, dict[str, Any]] = {}
    for case in CHECKED:
        old = case.old_manifest()
        if old is not None:
            answer = server.create({**old, "metadata": {"generateName": "api-rules-"}}, dry_run=False)
            assert answer.get("kind") == "LLMTrainJob", answer
            found[case.name] = answer
    yield found
    for job in found.values():
        server.call("DELETE", f"{_path(NAMESPACE)}/{job['metadata']['name']}")


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_the_server_blames_the_same_fields(server: Server, stored: dict[str, dict[str, Any]], case: Case) -> None:
    old = stored.get(case.name)
    answer = server.update(case.manifest(), old) if old else server.create(case.manifest())
    if not case.problems:
        assert answer.get("kind") == "LLMTrainJob", answer.get("message")
        return
    assert answer.get("kind") == "Status", "accepted"
    expected = case.problems if case.api_problems is None else case.api_problems
    assert _blamed(answer) == set(expected), answer["message"]


def _blamed(answer: dict[str, Any]) -> set[str]:
    """The fields that a refusal names: in its causes, or, for a field that does not exist, in its words."""
    causes = {
        cause["field"]
        for cause in answer.get("details", {}).get("causes", [])
        if cause.get("field") and not any(words in cause["message"] for words in BESIDE_THE_POINT)
    }
    words = answer["message"].split('unknown field "')[1:]
    return causes | {word.partition('"')[0] for word in words}


@pytest.mark.parametrize("case", [case for case in CHECKED if case.problems], ids=lambda case: case.name)
def test_a_rules_message_is_the_same_word_for_word(
    server: Server, stored: dict[str, dict[str, Any]], case: Case
) -> None:
    said = [word for word in case.words if word.endswith("is refused") or "is refused; allowed" in word]
    if not said:
        return
    old = stored.get(case.name)
    answer = server.update(case.manifest(), old) if old else server.create(case.manifest())
    assert [word for word in said if word not in answer["message"]] == [], answer["message"]


def test_defaults_are_what_the_python_side_fills_in(server: Server) -> None:
    for case in ACCEPTED:
        if case.old is None:
            assert server.create(case.manifest())["spec"] == complete(case.manifest())["spec"], case.name


def test_the_server_keeps_every_field_of_a_full_status(server: Server, stored: dict[str, dict[str, Any]]) -> None:
    path = f"{_path(NAMESPACE)}/{next(iter(stored.values()))['metadata']['name']}/status"
    status = FULL_STATUS.to_wire()
    job = server.call("GET", path.removesuffix("/status"))
    answer = server.call("PUT", path, {**job, "status": status}, fieldValidation="Strict")
    assert answer.get("status") == status, answer.get("message")


def test_a_scale_that_the_batch_does_not_allow_is_refused(server: Server, stored: dict[str, dict[str, Any]]) -> None:
    name = next(iter(stored.values()))["metadata"]["name"]
    path = f"{_path(NAMESPACE)}/{name}/scale"
    scale = server.call("GET", path)
    assert scale["spec"]["replicas"] == 2
    refused = server.call("PUT", path, {**scale, "spec": {"replicas": 3}}, dryRun="All")
    assert "a multiple of 6" in refused["message"]
    assert server.call("PUT", path, {**scale, "spec": {"replicas": 4}}, dryRun="All")["spec"]["replicas"] == 4


@pytest.mark.parametrize("example", sorted((REPOSITORY / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_server_accepts_the_examples(server: Server, example: Any) -> None:
    for manifest in load_documents(example.read_text(), example.name):
        manifest["metadata"]["namespace"] = NAMESPACE
        answer = server.create(manifest)
        assert answer.get("kind") == "LLMTrainJob", answer
