"""What to change when no layout fits. Each piece of advice has been tried on the job before it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmtrain_api.planning.machine import MACHINES, Machine
from llmtrain_api.planning.shapes import smallest
from llmtrain_api.validation import complete, validate

_MOST_WORKERS = 16
"""Times as many workers as the file asks for; more is no advice."""


def advice(manifest: dict[str, Any], machine: Machine) -> list[str]:
    """Return changes of a valid manifest, or of the machine, each of which alone lets some layout fit."""
    found = [text for text, changed in _changes(manifest) if not validate(changed) and _fits(changed, machine)]
    workers = _enough_workers(manifest, machine)
    if workers:
        found.append(f"set workers.replicas to {workers}")
    larger = [other for other in MACHINES.values() if other.memory_bytes > machine.memory_bytes and other.cores is None]
    for other in sorted(larger, key=lambda other: other.memory_bytes):
        if machine.cores is None and _fits(manifest, other):
            return [*found, f"use {other.name} ({other.memory_bytes / 1e9:.0f} GB)"]
    return found


def _changes(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    training = complete(manifest)["spec"]["training"]
    if "syncEveryMicroBatches" not in training:
        yield "set training.syncEveryMicroBatches to 1", _with(manifest, "training", {"syncEveryMicroBatches": 1})
    micro = training["microBatchSize"]
    while micro > 1 and micro % 2 == 0:
        micro //= 2
        yield f"lower training.microBatchSize to {micro}", _with(manifest, "training", {"microBatchSize": micro})
    if training["precision"] == "fp32":
        yield "set training.precision to bf16", _with(manifest, "training", {"precision": "bf16"})
    if training["optimizer"]["name"] == "adamw":
        lion = {"optimizer": {**training["optimizer"], "name": "lion"}}
        yield (
            "set training.optimizer.name to lion (another rule: see its rate and decay)",
            _with(manifest, "training", lion),
        )


def _enough_workers(manifest: dict[str, Any], machine: Machine) -> int | None:
    """Return the smallest doubling of the workers with which a layout fits, the batch as it is."""
    replicas = complete(manifest)["spec"]["workers"]["replicas"]
    times = 2
    while times <= _MOST_WORKERS:
        changed = _with(manifest, "workers", {"replicas": replicas * times})
        if not validate(changed) and _fits(changed, machine):
            return int(replicas * times)
        times *= 2
    return None


def _fits(manifest: dict[str, Any], machine: Machine) -> bool:
    nearest = smallest(manifest, machine)
    return nearest is not None and nearest.fits


def _with(manifest: dict[str, Any], part: str, changes: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    return {**manifest, "spec": {**spec, part: {**spec.get(part, {}), **changes}}}
