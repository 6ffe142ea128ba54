"""Every fault of the matrix: class, action and culprit are the right ones, and the losses those of an unhurt run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmtrain_kind.driver import OPERATOR_NAMESPACE, OPERATOR_SELECTOR, Driver, read_steps
from llmtrain_operator.core.times import from_timestamp
from tests.e2e.faults import CLAIM_FOLDER, LADDER, NODES, Bed, Fault, injector_folder
from tests.e2e.jobs import losses, small_job, wait_state, wait_step
from tests.e2e.recorder import Cost, JobWatch, watched

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAMESPACE = "matrix"
FOREVER = 100_000
EVERY_STEPS = 5
MEMORY = "3Gi"
LEDGER_SECONDS = 45.0
"""A training job's ledger is written with its progress, at least every 30 s."""
RECOVERY_SECONDS = 120.0
"""Far over what any row takes; a row's own figure is recorded, not asserted."""


@dataclass
class Patient:
    """A job under treatment."""

    bed: Bed
    watch: JobWatch


def manifest(name: str, **overrides: Any) -> dict[str, Any]:
    """Return a job that trains until it is deleted, with the injector in its ranks and a limit to its memory."""
    container = {
        "name": "trainer",
        "env": [{"name": "PYTHONPATH", "value": CLAIM_FOLDER}],
        "resources": {"limits": {"memory": MEMORY}},
    }
    template = {"spec": {"containers": [container]}}
    settings = {"training__steps": FOREVER, "checkpoint__everySteps": EVERY_STEPS, "workers__template": template}
    return small_job(NAMESPACE, name, **{**settings, **overrides})


@pytest.fixture(scope="module")
def folder(driver: Driver) -> Path:
    folder = driver.prepare_namespace(NAMESPACE)
    for old in folder.iterdir():  # of a run whose cluster was kept
        shutil.rmtree(old)
    injector_folder(folder)
    return folder


@contextmanager
def admitted(driver: Driver, folder: Path, name: str) -> Iterator[Patient]:
    """Have a job trained for the length of a block."""
    driver.apply(manifest(name))
    try:
        with watched(driver, NAMESPACE, name) as watch:
            wait_step(driver, folder / name, EVERY_STEPS)
            yield Patient(Bed(driver, NAMESPACE, name, folder), watch)
    finally:
        discharge(driver, name)


def discharge(driver: Driver, name: str) -> None:
    """Delete a job and wait for its pods to go: the next one needs their places."""
    driver.kubectl("delete", "ltj", name, "-n", NAMESPACE, "--ignore-not-found")
    driver.kubectl("wait", "--for=delete", "pod", "-l", f"llmtrain.dev/job={name}", "-n", NAMESPACE, "--timeout=60s")


@pytest.fixture(scope="module")
def patient(driver: Driver, folder: Path) -> Iterator[Patient]:
    with admitted(driver, folder, "hurt") as patient:
        yield patient


def suffer(patient: Patient, fault: Fault) -> None:
    """Deal the fault to a job that has nothing left of the last one; check what was made of it; note its cost."""
    bed, watch = patient.bed, patient.watch
    before = watch.wait(bed.driver, "the job to be well again", _well, RECOVERY_SECONDS)
    moment = fault.deal(bed)
    attempt = before["attempt"] + 1
    trouble = f"{fault.id}: attempt {attempt} to make a step"
    first = bed.driver.wait(trouble, lambda: _first_step(bed.store, attempt), RECOVERY_SECONDS, 0.1)
    while bed.mended:
        bed.mended.pop()()
    told = watch.wait(bed.driver, "the cost of the fault", lambda status: _told(status, attempt), RECOVERY_SECONDS)
    found = (told["class"], told["action"], told.get("worker"))
    assert found == (fault.failure_class, fault.action, fault.worker), told
    assert fault.message in told["message"], told
    assert fault.skips in watch.status["checkpoint"].get("skipped", ""), watch.status["checkpoint"]
    _adds_up(bed, watch.status)
    seen_at = watch.first(attempt)
    assert seen_at is not None
    Cost(fault.id, round(seen_at - moment, 2), round(first - moment, 2), told["lostSteps"]).keep()


def _adds_up(bed: Bed, status: dict[str, Any]) -> None:
    """Check that the parts of the goodput ledger are the wall time within 1 %."""
    words = ("get", "ltj", bed.name, "-n", bed.namespace, "-o", "jsonpath={.metadata.creationTimestamp}")
    ledger = status["goodput"]
    created, until = from_timestamp(bed.driver.kubectl(*words).strip()), from_timestamp(ledger["accountedUntil"])
    assert created and until
    assert sum(ledger["milliseconds"].values()) / 1000 == pytest.approx(until - created, rel=0.01), ledger
    assert ledger["milliseconds"]["restart"] > 0, ledger
    assert time.time() - until < LEDGER_SECONDS, ledger


def _well(status: dict[str, Any]) -> dict[str, Any] | None:
    restarts = status.get("restarts", {})
    spent = restarts.get("sinceProgress") or restarts.get("byWorkerSinceProgress")
    return status if status.get("state") == "Training" and not spent and status.get("checkpoint") else None


def _first_step(store: Path, attempt: int) -> float | None:
    return next((line.time for line in read_steps(store) if line.attempt >= attempt), None)


def _told(status: dict[str, Any], attempt: int) -> dict[str, Any] | None:
    found = [failure for failure in status.get("failures", []) if failure["attempt"] == attempt - 1]
    return found[-1] if found and "secondsToNextStep" in found[-1] else None


@pytest.fixture(scope="module")
def treated() -> list[Path]:
    """Stores of the jobs that went through faults, for the last look at their losses."""
    return []


@pytest.mark.parametrize("fault", LADDER, ids=lambda fault: fault.id)
def test_a_fault_is_named_and_repaired_by_the_cheapest_step(
    patient: Patient, treated: list[Path], fault: Fault
) -> None:
    suffer(patient, fault)
    if patient.bed.store not in treated:
        treated.append(patient.bed.store)


def test_the_patient_leaves_its_nodes_to_the_next(driver: Driver, patient: Patient) -> None:
    discharge(driver, patient.bed.name)
    assert driver.workers(NAMESPACE, patient.bed.name) == {}


# --- nodes -----------------------------------------------------------------------------------------------------------


@contextmanager
def spare(driver: Driver) -> Iterator[None]:
    """Keep new pods off the operator's node for the length of a block: a later fault then finds a spare node there."""
    words = (
        "get",
        "pod",
        "-n",
        OPERATOR_NAMESPACE,
        "-l",
        OPERATOR_SELECTOR,
        "-o",
        "jsonpath={.items[0].spec.nodeName}",
    )
    node = driver.kubectl(*words).strip()
    driver.kubectl("cordon", node)
    try:
        yield
    finally:
        driver.kubectl("uncordon", node)


@pytest.mark.parametrize("fault", NODES, ids=lambda fault: fault.id)
def test_a_lost_node_is_replaced_and_does_not_disturb_when_it_is_back(
    driver: Driver, folder: Path, treated: list[Path], fault: Fault
) -> None:
    name = fault.id.split(",")[0].replace(" ", "-")
    with spare(driver):  # until both workers have their place
        driver.apply(manifest(name))
        wait_step(driver, folder / name, 1)
    with admitted(driver, folder, name) as patient:
        lost = patient.bed.node(1)
        suffer(patient, fault)
        attempt = patient.watch.status["attempt"]
        driver.kubectl("wait", "--for=condition=Ready", f"node/{lost}", "--timeout=120s")
        time.sleep(10)  # what the healed node still runs has its chance to disturb
        step = read_steps(patient.bed.store)[-1].step
        wait_step(driver, patient.bed.store, step + EVERY_STEPS)
        assert patient.watch.status["attempt"] == attempt
        treated.append(patient.bed.store)


# --- losses ----------------------------------------------------------------------------------------------------------


def test_after_all_of_them_the_losses_are_those_of_an_unhurt_run(
    driver: Driver, folder: Path, treated: list[Path]
) -> None:
    """One unhurt run beside all of them: their manifests differ in nothing but the name."""
    assert treated
    hurt = {store.name: losses(read_steps(store)) for store in treated}
    longest = max(max(steps) for steps in hurt.values())
    # The schedule of the learning rate depends on the number of steps, so this one has as many and is stopped early.
    driver.apply(manifest("unhurt"))
    try:
        unhurt = losses(wait_step(driver, folder / "unhurt", longest, 400))
    finally:
        discharge(driver, "unhurt")
    for name, steps in hurt.items():
        assert sorted(steps) == list(range(1, max(steps) + 1)), name
        assert {step: values for step, values in steps.items() if values != unhurt[step]} == {}, name


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_program_that_refuses_its_input_is_not_restarted(driver: Driver, folder: Path) -> None:
    with admitted(driver, folder, "refuses") as patient:
        patient.bed.order(1, "exit 64")
        job = wait_state(driver, NAMESPACE, "refuses", "Failed", 60)
        failure = job["status"]["failures"][-1]
        assert (failure["class"], failure["action"], failure["worker"]) == ("UserError", "FailJob", 0)
        assert job["status"]["attempt"] == 1


def test_a_namespace_can_be_deleted_while_its_job_trains(driver: Driver) -> None:
    folder = driver.prepare_namespace("doomed")
    driver.apply(small_job("doomed", "doomed", training__steps=FOREVER))
    wait_step(driver, folder / "doomed", 2)
    driver.kubectl("delete", "namespace", "doomed", "--wait=true", timeout=120)
