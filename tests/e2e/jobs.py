"""Manifests and looks that e2e tests share."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from llmtrain_kind.driver import TRAINER_IMAGE, Driver, StepLine, read_steps

CLAIM = "checkpoints"


def small_job(namespace: str, name: str, **overrides: Any) -> dict[str, Any]:
    """Return a manifest: 2 workers x 2 ranks on CPU, the `tiny` model, checkpoints every 10 steps.

    Overrides are dotted paths below spec with '__' for the dot, for instance training__steps=5.
    """
    job: dict[str, Any] = {
        "apiVersion": "llmtrain.dev/v1alpha1",
        "kind": "LLMTrainJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "workers": {
                "replicas": 2,
                "ranksPerWorker": 2,
                "device": "cpu",
                "accelerator": {"resource": "nvidia.com/gpu", "count": 8},
                "image": TRAINER_IMAGE,
            },
            "model": {"preset": "tiny"},
            "training": {"steps": 60, "globalBatchSize": 8, "microBatchSize": 1, "precision": "fp32"},
            "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
            "checkpoint": {"store": f"pvc://{CLAIM}/{name}", "everySteps": 10},
        },
    }
    result = copy.deepcopy(job)
    for path, value in overrides.items():
        *parents, leaf = path.split("__")
        target = result["spec"]
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = value
    return result


def wait_state(driver: Driver, namespace: str, name: str, state: str, timeout: float = 300) -> dict[str, Any]:
    """Wait until the job is in a state; stop at once with the job's message when it ended in another one."""

    def look() -> dict[str, Any] | None:
        job = driver.job(namespace, name)
        now = job.get("status", {}).get("state")
        if now in ("Succeeded", "Failed") and now != state:
            raise AssertionError(f"{name} is {now}: {json.dumps(job['status'], indent=1)}")
        return job if now == state else None

    job: dict[str, Any] = driver.wait(f"{name} to be {state}", look, timeout, 0.5)
    return job


def wait_step(driver: Driver, store: Path, step: int, timeout: float = 180) -> list[StepLine]:
    """Wait until a step of that number or a later one was made."""

    def look() -> list[StepLine]:
        lines = read_steps(store)
        return lines if lines and lines[-1].step >= step else []

    lines: list[StepLine] = driver.wait(f"step {step} in {store}", look, timeout, 0.1)
    return lines


def losses(lines: list[StepLine]) -> dict[int, set[str]]:
    """Return step to the distinct losses seen for it, as exact hexadecimal floats."""
    seen: dict[int, set[str]] = {}
    for line in lines:
        seen.setdefault(line.step, set()).add(line.loss.hex())
    return seen


def condition(job: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a condition of a job's status.

    Raises:
        StopIteration: there is none of that type.
    """
    found: dict[str, Any] = next(c for c in job["status"]["conditions"] if c["type"] == kind)
    return found
