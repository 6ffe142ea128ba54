"""Hours of what test_survival does in minutes: `make soak`."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from llmtrain_kind.driver import Driver, read_steps
from tests.e2e.jobs import losses, small_job, wait_state, wait_step
from tests.e2e.test_survival import NAMESPACE, hurt

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

STEPS = 4000
KILLS = 300


@pytest.mark.timeout(4 * 3600)
def test_three_hundred_kills_and_every_step_has_one_loss(driver: Driver) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    choice = random.Random(seed)
    folder: Path = driver.prepare_namespace(NAMESPACE)
    job = small_job(NAMESPACE, "soak", training__steps=STEPS, checkpoint__everySteps=5)
    job["spec"]["failurePolicy"] = {"budgets": {"crash": 1000, "communication": 1000, "startup": 1000}}
    driver.apply(job)
    wait_step(driver, folder / "soak", 2)
    for _ in range(KILLS):
        hurt(driver, choice.choice(["rank", "rank", "pod", "agent", "operator"]), "soak", choice)
        time.sleep(choice.uniform(0.0, 20.0))
    wait_state(driver, NAMESPACE, "soak", "Succeeded", 3600)
    seen = losses(read_steps(folder / "soak"))
    assert sorted(seen) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in seen.values())
