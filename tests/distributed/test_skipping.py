"""Steps whose numbers are no good are skipped by all ranks alike, and a resumed run skips the same ones."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.ranks import Job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

OVERFLOWING: dict[str, Any] = {
    "training": {
        "steps": 16,
        "precision": "fp16",
        "lossScale": {"initial": 2**30, "hysteresis": 1, "growthSteps": 3},
        "skipping": {"maxInARow": 0},
    }
}
SPIKING: dict[str, Any] = {
    "training": {"steps": 60, "globalBatchSize": 4, "skipping": {"spikeSigmas": 1.0, "maxInARow": 1000}}
}


def _story(job: Job) -> list[tuple[float, bool, float]]:
    last = {line["step"]: line for line in job.metrics()}
    return [(line["loss"], bool(line["skipped"]), line["loss_scale"]) for _, line in sorted(last.items())]


@pytest.mark.parametrize(
    ("changes", "parallelism"),
    [(OVERFLOWING, {}), (OVERFLOWING, {"tensor": 2}), (OVERFLOWING, {"pipeline": 2}), (SPIKING, {})],
    ids=["fp16", "fp16-tensor", "fp16-pipeline", "spikes"],
)
def test_skipped_steps_change_nothing_and_are_the_same_after_a_resume(
    new_job: Callable[..., Job], changes: dict[str, Any], parallelism: dict[str, int]
) -> None:
    steps = changes["training"]["steps"]
    whole, halves = (new_job(name, parallelism=parallelism, **changes) for name in ("whole", "halves"))
    assert whole.run(2).wait() == [0, 0]
    story = _story(whole)
    skipped = [number for number, (_, was, _) in enumerate(story) if was]
    assert 0 < len(skipped) < steps
    assert whole.metrics()[-1]["skipped_steps"] == len(skipped)
    gang = halves.launch(2)
    gang.until_step(steps - 5)
    gang.signal(signal.SIGKILL, 1)
    gang.wait()
    assert halves.run(2).wait() == [0, 0]
    assert _story(halves) == story


def test_spikes_are_the_same_for_one_process_and_for_four(new_job: Callable[..., Job]) -> None:
    one, four = new_job("one", **SPIKING), new_job("four", **SPIKING)
    assert one.run(1).wait() == [0]
    assert four.run(4, changes={"parallelism": {"tensor": 2, "replicate": 2}}).wait() == [0] * 4
    for (loss, was, _), (other, other_was, _) in zip(_story(one), _story(four), strict=True):
        assert was == other_was
        assert abs(loss - other) <= 2e-6


def test_fp16_starts_where_fp32_starts(new_job: Callable[..., Job]) -> None:
    exact, half = new_job("exact"), new_job("half")
    assert exact.run(1).wait() == [0]
    changes = {"training": {"precision": "fp16", "lossScale": {"initial": 1024}}, "parallelism": {"tensor": 2}}
    assert half.run(4, changes=changes).wait() == [0] * 4
    for loss, other in zip(exact.losses(), half.losses(), strict=True):
        assert abs(loss - other) <= 1e-3
