"""From a pod to a worker: everything the core wants to know, and nothing that makes it fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain_operator.core.actions import CreateWorker
from llmtrain_operator.core.worker_pod import PodSettings, build_pod
from llmtrain_operator.kube.translate import belongs_to, job_of, to_worker
from llmtrain_operator.runtime.backend import JobKey
from tests.support.jobs import JobBuilder

Object = dict[str, Any]


def _pod(**status: Any) -> Object:
    pod = build_pod(JobBuilder("demo", "lab").build(), CreateWorker("demo-w1-a3", 1, 3), PodSettings("http://c"))
    pod["metadata"] |= {"uid": "u1", "creationTimestamp": "2026-11-30T21:24:53Z"}
    pod["status"] = {"phase": "Pending", **status}
    return pod


def _trainer(**state: Any) -> list[Object]:
    return [{"name": "sidecar", "state": {"running": {}}}, {"name": "trainer", "state": state}]


def test_a_pod_that_we_built_is_read_back() -> None:
    pod = _pod()
    worker = to_worker(pod, None)
    assert worker is not None
    assert (worker.name, worker.uid, worker.index, worker.created_attempt, worker.replicas) == (
        "demo-w1-a3",
        "u1",
        1,
        3,
        2,
    )
    assert (worker.phase, worker.deleting, worker.created_at) == ("Pending", False, 1796073893.0)
    assert job_of(pod) == JobKey("lab", "demo")
    assert belongs_to(pod, "uid-demo")
    assert not belongs_to(pod, "uid-other")


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}

CASES: dict[str, tuple[Object, Object]] = {
    "running": ({"phase": "Running", "containerStatuses": _trainer(running={})}, {"phase": "Running"}),
    "its node is silent": ({"phase": "Unknown"}, {"phase": "Running"}),
    "no status yet": ({"phase": None}, {"phase": "Pending"}),
    "starting": (
        {"containerStatuses": _trainer(waiting={"reason": "ContainerCreating"})},
        {"waiting_reason": "", "waiting_since": None},
    ),
    "image": (
        {"containerStatuses": _trainer(waiting={"reason": "ErrImagePull", "message": "no such image"})},
        {"waiting_reason": "ErrImagePull", "waiting_message": "no such image", "waiting_since": 7.0},
    ),
    "image of a user's init container": (
        {
            "initContainerStatuses": [
                {"name": "prepare", "state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}
            ]
        },
        {"waiting_reason": "ErrImagePull", "waiting_message": "container prepare: no"},
    ),
    "no node": ({"conditions": [UNSCHEDULABLE]}, {"unschedulable_message": "0/3 nodes"}),
    "killed": (
        {"phase": "Failed", "containerStatuses": _trainer(terminated={"exitCode": 137, "reason": "Error"})},
        {"phase": "Failed", "exit_code": 137, "oom_killed": False},
    ),
    "out of memory": (
        {"phase": "Failed", "containerStatuses": _trainer(terminated={"exitCode": 137, "reason": "OOMKilled"})},
        {"exit_code": 137, "oom_killed": True},
    ),
    "evicted by the API": ({"conditions": [DISRUPTED]}, {"disruption": "EvictionByEvictionAPI"}),
    "evicted by the kubelet": ({"phase": "Failed", "reason": "Evicted"}, {"disruption": "Evicted"}),
    "refused by the kubelet": ({"phase": "Failed", "reason": "OutOfcpu"}, {"disruption": "", "exit_code": None}),
}


@pytest.mark.parametrize(("status", "expected"), CASES.values(), ids=CASES.keys())
def test_what_a_status_tells(status: Object, expected: Object) -> None:
    worker = to_worker(_pod(**status), 7.0)
    assert {name: getattr(worker, name) for name in expected} == expected


@pytest.mark.parametrize("label", ["llmtrain.dev/worker", "llmtrain.dev/attempt"])
@pytest.mark.parametrize("value", [None, "", "x", "-1", "\u0661"])
def test_a_pod_whose_labels_were_taken_away_is_no_worker(label: str, value: str | None) -> None:
    pod = _pod()
    pod["metadata"]["labels"][label] = value
    assert to_worker(pod, None) is None


_leaf = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
_waiting = st.fixed_dictionaries({}, optional={"reason": _leaf, "message": _leaf})
_state = st.fixed_dictionaries({}, optional={"waiting": st.none() | _waiting, "terminated": st.none() | _waiting})
_container = st.fixed_dictionaries({}, optional={"name": _leaf, "state": st.none() | _state})
_condition = st.fixed_dictionaries({}, optional={"type": _leaf, "status": _leaf, "reason": _leaf})


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "phase": _leaf,
            "reason": _leaf,
            "conditions": st.none() | st.lists(_condition, max_size=3),
            "containerStatuses": st.none() | st.lists(_container, max_size=3),
            "initContainerStatuses": st.none() | st.lists(_container, max_size=3),
        },
    )
)
def test_no_status_makes_it_fail(status: Object) -> None:
    to_worker({**_pod(), "status": status}, None)
