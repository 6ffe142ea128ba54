"""Bad input that only shows at run time: each gets one clear message, and other jobs go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain_kind.driver import Driver, DriverError
from tests.e2e.jobs import condition, small_job, wait_state, wait_step

pytestmark = pytest.mark.cluster

NAMESPACE = "refusals"


@pytest.fixture(scope="module")
def folder(driver: Driver) -> Path:
    return driver.prepare_namespace(NAMESPACE)


@pytest.fixture(scope="module")
def bystander(driver: Driver, folder: Path) -> Iterator[str]:
    """A job that must not be troubled by any of this."""
    driver.apply(
        small_job(NAMESPACE, "bystander", training__steps=100_000, workers__replicas=1, workers__ranksPerWorker=1)
    )
    wait_step(driver, folder / "bystander", 2)
    yield "bystander"
    driver.kubectl("delete", "ltj", "bystander", "-n", NAMESPACE)


FAILING: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "data-missing": (
        {"data__sources": [{"uri": "file:///nowhere/at/all"}]},
        ("data.sources[0].uri", "/nowhere/at/all"),
    ),
    "store-not-writable": ({"checkpoint__store": "file:///proc/no"}, ("checkpoint.store", "/proc/no")),
    "image-missing": (
        {
            "workers__image": "localhost/no-such-image:1",
            "failurePolicy": {"deadlines": {"imagePullSeconds": 5}},
        },
        ("workers.image", "localhost/no-such-image:1"),
    ),
    "never-scheduled": (
        {
            "workers__template": {"spec": {"nodeSelector": {"no-such-label": "x"}}},
            "failurePolicy": {"deadlines": {"pendingSeconds": 5}, "budgets": {"startup": 0}},
        },
        ("node",),
    ),
}


@pytest.mark.parametrize("name", sorted(FAILING))
def test_a_user_error_fails_the_job_with_a_message(driver: Driver, bystander: str, folder: Path, name: str) -> None:
    overrides, words = FAILING[name]
    driver.apply(small_job(NAMESPACE, name, workers__replicas=1, workers__accelerator={"count": 0}, **overrides))
    job = wait_state(driver, NAMESPACE, name, "Failed", 120)
    message = condition(job, "Failed")["message"]
    for word in words:
        assert word in message, message
    assert driver.job(NAMESPACE, bystander)["status"]["attempt"] == 1


def test_an_empty_dataset_is_named(driver: Driver, folder: Path) -> None:
    (folder / "empty").mkdir(mode=0o777, exist_ok=True)
    overrides: dict[str, Any] = {"data__sources": [{"uri": "pvc://checkpoints/empty"}]}
    driver.apply(small_job(NAMESPACE, "data-empty", workers__replicas=1, **overrides))
    message = condition(wait_state(driver, NAMESPACE, "data-empty", "Failed", 120), "Failed")["message"]
    assert "data.sources[0].uri" in message
    assert "pvc://checkpoints/empty" in message


def test_two_jobs_cannot_share_a_store(driver: Driver, bystander: str, folder: Path) -> None:
    driver.apply(small_job(NAMESPACE, "second", checkpoint__store=f"pvc://checkpoints/{bystander}"))
    job = wait_state(driver, NAMESPACE, "second", "Blocked", 60)
    accepted = condition(job, "Accepted")
    assert accepted["status"] == "False"
    assert accepted["reason"] == "StoreConflict"
    for word in ("checkpoint.store", bystander, f"pvc://checkpoints/{bystander}"):
        assert word in accepted["message"]
    assert driver.workers(NAMESPACE, "second") == {}
    driver.kubectl("delete", "ltj", "second", "-n", NAMESPACE)


def test_an_immutable_field_cannot_be_edited(driver: Driver, bystander: str) -> None:
    patch = json.dumps({"spec": {"training": {"seed": 99}}})
    with pytest.raises(DriverError, match=r"spec\.training\.seed.*cannot change once the job exists"):
        driver.kubectl("patch", "ltj", bystander, "-n", NAMESPACE, "--type", "merge", "-p", patch)


POST = """
import json, os, sys, urllib.error, urllib.request
path, token, body = sys.argv[1:4]
headers = {"Content-Type": "application/json"}
if token == "own":
    token = open(os.environ["LLMTRAIN_TOKEN_FILE"]).read().strip()
if token:
    headers["Authorization"] = "Bearer " + token
request = urllib.request.Request(os.environ["LLMTRAIN_COORDINATOR_URL"] + path, body.encode(), headers)
try:
    print(urllib.request.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


def test_the_coordinator_refuses_strangers_and_nonsense(driver: Driver, bystander: str, folder: Path) -> None:
    driver.apply(small_job(NAMESPACE, "other", training__steps=100_000, workers__replicas=1, workers__ranksPerWorker=1))
    wait_step(driver, folder / "other", 1)
    mine = driver.workers(NAMESPACE, "other")[0]
    theirs = driver.workers(NAMESPACE, bystander)[0]

    def post(job: str, pod: str, token: str, body: str) -> str:
        path = f"/v1/jobs/{NAMESPACE}/{job}/workers/{pod}/sync"
        return driver.kubectl(
            "exec", mine, "-n", NAMESPACE, "-c", "trainer", "--", "python3", "-c", POST, path, token, body
        )

    good = json.dumps({"jobUid": "x", "agentId": "a", "sequence": 0, "address": "10.0.0.1"})
    assert post(bystander, theirs, "own", good).startswith("403")
    assert post(bystander, theirs, "", good).startswith("401")
    assert post("other", mine, "own", "{").startswith("400")
    malformed = post(
        "other", mine, "own", json.dumps({"jobUid": "x", "agentId": "a", "sequence": "many", "address": ""})
    )
    assert malformed.startswith("400")
    assert "sequence" in malformed
    assert driver.job(NAMESPACE, bystander)["status"]["attempt"] == 1
    driver.kubectl("delete", "ltj", "other", "-n", NAMESPACE)
