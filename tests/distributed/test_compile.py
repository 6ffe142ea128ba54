"""Compiled layers give the losses of layers that are not, in every kind of layout, and a hurt run's bits."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.test_parity import FP32_LOSS, FP32_NORM
from tests.support.ranks import Job, merged

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

COMPILED: dict[str, Any] = {"training": {"compile": True}}
COMPILER_SECONDS = 400.0  # many kernels, on a machine that does other things too
EXPERTS: dict[str, Any] = {"model": {"moe": {"experts": 4, "ffnDim": 48}}}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("2 ranks, ZeRO-3, recompute full", 2, {"parallelism": {"recompute": "full"}}),
    ("4 ranks, tensor 2, pipeline 2", 4, {"parallelism": {"tensor": 2, "pipeline": 2, "zeroStage": 1}}),
    ("2 ranks, expert 2", 2, {"parallelism": {"expert": 2}, **EXPERTS}),
]


def _run(job: Job, world_size: int, changes: dict[str, Any]) -> list[tuple[float, float]]:
    assert job.launch(world_size, changes=changes).wait(COMPILER_SECONDS) == [0] * world_size
    return [(line["loss"], line["grad_norm"]) for line in job.metrics()]


def test_compiled_layers_give_the_same_losses_and_a_killed_rank_the_same_bits(new_job: Callable[..., Job]) -> None:
    alone = {False: _run(new_job("alone"), 1, {}), True: _run(new_job("alone-experts"), 1, EXPERTS)}
    for number, (name, world_size, changes) in enumerate(LAYOUTS):
        job = new_job(f"layout-{number}")
        found = _run(job, world_size, merged(COMPILED, changes))
        assert list((job.work_dir or job.folder / "work").glob("compiled/**/*.so")), "nothing has been compiled"
        for (loss, norm), (loss_alone, norm_alone) in zip(found, alone["model" in changes], strict=True):
            assert abs(loss - loss_alone) <= FP32_LOSS, name
            assert math.isclose(norm, norm_alone, rel_tol=FP32_NORM), name
        if number == 0:
            _hurt(new_job("hurt", **merged(COMPILED, changes)), job.losses())


def _hurt(job: Job, unhurt: list[float]) -> None:
    gang = job.launch(2)
    gang.until(lambda: gang.last_step() >= 3 or len(gang.codes) == 2, "step 3", COMPILER_SECONDS)
    gang.signal(signal.SIGKILL)
    gang.wait()
    _run(job, 2, {})
    assert job.losses() == unhurt


def test_without_a_compiler_the_field_is_named(new_job: Callable[..., Job]) -> None:
    gang = new_job().launch(1, changes=COMPILED, environment={"CXX": "/nowhere/g++"})
    assert gang.wait() == [64], gang.output()
    message = gang.error()["message"]
    assert "spec.training.compile: True: torch.compile needs a C++ compiler" in message
    assert "; allowed: " in message and "; fix: " in message
