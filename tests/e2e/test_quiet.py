"""The operator leaves the API server alone: counted in the API server's own audit log."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain_kind.driver import Driver
from tests.e2e.jobs import small_job, wait_state, wait_step

pytestmark = pytest.mark.cluster

NAMESPACE = "quiet"
OPERATOR = "system:serviceaccount:llmtrain-system:"
WRITES = {"create", "update", "patch", "delete", "deletecollection"}


@pytest.fixture(scope="module")
def folder(driver: Driver) -> Path:
    return driver.prepare_namespace(NAMESPACE)


def operator_writes(driver: Driver, since: float) -> list[dict[str, Any]]:
    """Return the operator's finished write requests since a moment, its leader lease aside."""
    assert driver.audit_log is not None
    found = []
    with open(driver.audit_log) as lines:
        for line in lines:
            entry = json.loads(line)
            reference = entry.get("objectRef") or {}
            if entry.get("stage") != "ResponseComplete" or reference.get("resource") == "leases":
                continue
            if not entry["user"]["username"].startswith(OPERATOR) or entry["verb"] not in WRITES:
                continue
            stamp = entry["requestReceivedTimestamp"].rstrip("Z")[:26]
            if time.mktime(time.strptime(stamp.split(".")[0], "%Y-%m-%dT%H:%M:%S")) - time.timezone >= since:
                found.append(entry)
    return found


def test_a_settled_job_makes_no_write_and_a_healthy_one_at_most_two_a_minute(driver: Driver, folder: Path) -> None:
    if driver.audit_log is None:
        raise AssertionError("this provider keeps no audit log: run with the local provider")
    driver.apply(small_job(NAMESPACE, "settled", training__steps=5, workers__replicas=1, workers__ranksPerWorker=1))
    wait_state(driver, NAMESPACE, "settled", "Succeeded", 120)
    healthy = small_job(NAMESPACE, "healthy", training__steps=100_000, workers__replicas=1, workers__ranksPerWorker=1)
    driver.apply(healthy)
    wait_state(driver, NAMESPACE, "healthy", "Training", 120)
    wait_step(driver, folder / "healthy", 20)
    time.sleep(5)  # events and other tails of the start
    begin = time.time()
    # An annotation makes the operator look at the settled job again.
    driver.kubectl("annotate", "ltj", "settled", "-n", NAMESPACE, f"look={begin}")
    time.sleep(90)
    writes = operator_writes(driver, begin)
    settled = [w for w in writes if w["objectRef"].get("name", "").startswith("settled")]
    assert settled == []
    status_writes = [w for w in writes if w["objectRef"].get("subresource") == "status"]
    others = [
        w
        for w in writes
        if w["objectRef"].get("subresource") != "status" and w["objectRef"].get("namespace") == NAMESPACE
    ]
    assert 1 <= len(status_writes) <= 3, [w["requestReceivedTimestamp"] for w in status_writes]
    assert others == []
    driver.kubectl("delete", "ltj", "healthy", "-n", NAMESPACE)
