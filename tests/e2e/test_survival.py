"""A job is hurt in every way this issue of the product handles, and ends with the losses of an unhurt one."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from llmtrain_kind.driver import Driver, DriverError, read_steps
from tests.e2e.jobs import losses, small_job, wait_state, wait_step

pytestmark = pytest.mark.cluster

NAMESPACE = "survival"
STEPS = 300
EVERY_STEPS = 5
"""Between checkpoints: kills that come faster than these are answered with growing pauses."""


@pytest.fixture(scope="module")
def folder(driver: Driver) -> Path:
    return driver.prepare_namespace(NAMESPACE)


@pytest.fixture(scope="module")
def reference(driver: Driver, folder: Path) -> dict[int, set[str]]:
    """Losses of an unhurt run, step by step."""
    driver.apply(small_job(NAMESPACE, "unhurt", training__steps=STEPS, checkpoint__everySteps=EVERY_STEPS))
    job = wait_state(driver, NAMESPACE, "unhurt", "Succeeded", 600)
    assert job["status"]["attempt"] == 1
    assert job["status"]["restarts"]["total"] == 0
    seen = losses(read_steps(folder / "unhurt"))
    assert sorted(seen) == list(range(1, STEPS + 1))
    return seen


def hurt(driver: Driver, kind: str, name: str, choice: random.Random) -> None:
    """Deal one blow; a target that is being replaced at this very moment is tried again."""
    if kind == "operator":
        driver.delete_operator()
        return
    for _ in range(100):
        pods = driver.workers(NAMESPACE, name)
        try:
            index = choice.choice(sorted(pods))
            if kind == "rank":
                driver.kill_rank(NAMESPACE, pods[index], 2 * index + choice.randrange(2))
            elif kind == "agent":
                driver.kill_agent(NAMESPACE, pods[index])
            else:
                driver.delete_pod(NAMESPACE, pods[index], force=choice.random() < 0.5)
            return
        except (DriverError, IndexError):
            time.sleep(0.3)
    raise AssertionError(f"no target for {kind} in 100 tries")


@pytest.mark.timeout(900)
def test_twenty_kills_at_random_moments_end_with_the_same_loss_bits(
    driver: Driver, folder: Path, reference: dict[int, set[str]]
) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    choice = random.Random(seed)
    kinds = ["rank"] * 7 + ["pod"] * 5 + ["agent"] * 4 + ["operator"] * 4
    choice.shuffle(kinds)
    job = small_job(NAMESPACE, "hurt", training__steps=STEPS, checkpoint__everySteps=EVERY_STEPS)
    job["spec"]["failurePolicy"] = {"budgets": {"crash": 40, "communication": 40, "startup": 40, "checkpoint": 40}}
    driver.apply(job)
    wait_step(driver, folder / "hurt", 2)
    for kind in kinds:
        hurt(driver, kind, "hurt", choice)
        time.sleep(choice.uniform(0.0, 5.0))  # the moment is what is random, also in the middle of a recovery
    done = wait_state(driver, NAMESPACE, "hurt", "Succeeded", 600)
    assert done["status"]["restarts"]["total"] >= 8
    seen = losses(read_steps(folder / "hurt"))
    assert seen == reference, {
        step: (seen.get(step), reference[step]) for step in reference if seen.get(step) != reference[step]
    }


@pytest.mark.timeout(600)
def test_training_goes_on_while_the_api_server_is_away(
    driver: Driver, folder: Path, reference: dict[int, set[str]]
) -> None:
    if driver.provider != "local":
        raise AssertionError("stopping the API server needs the local provider")
    driver.apply(small_job(NAMESPACE, "outage", training__steps=STEPS * 4))
    before = wait_step(driver, folder / "outage", 5)[-1]
    driver.fault("node", "control-plane", "kill")
    try:
        time.sleep(60)  # the length of the outage is the test
        during = read_steps(folder / "outage")[-1]
    finally:
        driver.fault("node", "control-plane", "start")
    assert during.step > before.step + 20
    assert during.attempt == before.attempt == 1

    def caught_up() -> bool:
        try:
            progress = driver.job(NAMESPACE, "outage")["status"].get("progress") or {}
        except DriverError:
            return False
        return int(progress.get("step", 0)) > before.step

    driver.wait("status to catch up", caught_up, 120)
    status = driver.job(NAMESPACE, "outage")["status"]
    assert status["attempt"] == 1, json.dumps(status)
    seen = losses(read_steps(folder / "outage"))
    assert all(len(values) == 1 for values in seen.values())
    driver.kubectl("delete", "ltj", "outage", "-n", NAMESPACE)


def test_deleting_the_job_with_the_operator_down_removes_everything(driver: Driver, folder: Path) -> None:
    driver.apply(small_job(NAMESPACE, "orphan", training__steps=100_000))
    wait_step(driver, folder / "orphan", 2)
    deployment = ("deployment", "-n", "llmtrain-system", "-l", "app.kubernetes.io/name=llmtrain")
    driver.kubectl("scale", *deployment, "--replicas=0")
    try:
        driver.kubectl("delete", "ltj", "orphan", "-n", NAMESPACE, "--wait=true", timeout=30)

        def gone() -> bool:
            left = driver.kubectl("get", "pods,secrets", "-n", NAMESPACE, "-l", "llmtrain.dev/job=orphan", "-o", "name")
            return not left.strip()

        driver.wait("children to be collected", gone, 120)
        assert (folder / "orphan" / "metrics.jsonl").exists(), "checkpoints and metrics are the user's: they stay"
    finally:
        driver.kubectl("scale", *deployment, "--replicas=1")
