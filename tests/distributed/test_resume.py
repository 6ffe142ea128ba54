"""A run that is hurt ends with the very bits of one that is not."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Gang, Job, merged

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

TWELVE: dict[str, Any] = {"training": {"steps": 12}}


def _finish(job: Job, world_size: int, **options: Any) -> Gang:
    gang = job.run(world_size, **options)
    assert gang.wait() == [0] * world_size, gang.output()
    return gang


@pytest.fixture
def unhurt(new_job: Callable[..., Job]) -> list[float]:
    """The losses of twelve undisturbed steps on two ranks."""
    job = new_job("unhurt", **TWELVE)
    _finish(job, 2)
    return job.losses()


def test_two_unhurt_runs_have_the_same_bits_and_learn(new_job: Callable[..., Job], unhurt: list[float]) -> None:
    again = new_job("again", **TWELVE)
    _finish(again, 2)
    assert again.losses() == unhurt
    assert unhurt[-1] < unhurt[0]
    other = new_job("other-seed", training={"steps": 12, "seed": 5})
    _finish(other, 2)
    assert other.losses()[0] != unhurt[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_at_random_moments_repeats_no_bit_wrongly(
    new_job: Callable[..., Job], unhurt: list[float], seed: int
) -> None:
    chance = random.Random(seed)
    job = new_job("hurt", **TWELVE)
    for _ in range(4):
        before = len(job.metrics()) if job.store.exists() and (job.store / "metrics.jsonl").exists() else 0
        gang = job.launch(2)
        lines = before + chance.randrange(0, 4)
        gang.until(lambda: _lines(job) >= lines or len(gang.codes) == 2, "some steps")  # noqa: B023
        victim = chance.randrange(2)
        gang.signal(signal.SIGKILL, victim)
        gang.until(lambda: victim in gang.codes, "the victim ends")  # noqa: B023
        if lines == before:  # it may not have met the other yet, who then waits for it until the agent ends it too
            gang.signal(signal.SIGKILL)
        assert set(gang.wait()) <= {-9, 75, 0}, gang.output()
    _finish(job, 2)
    assert job.losses() == unhurt
    assert job.checkpoints()[-1] == "step-00000012"
    assert not [name for name in job.checkpoints() if not name.removeprefix("step-").isdigit()], "nothing half-written"


def _lines(job: Job) -> int:
    try:
        return (job.store / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def test_sigterm_finishes_the_step_checkpoints_and_exits_143(new_job: Callable[..., Job], unhurt: list[float]) -> None:
    never = {"checkpoint": {"everySteps": 1000}}
    job = new_job("terminated", **TWELVE)
    gang = job.launch(2, changes=never)
    gang.until_step(3)
    gang.signal(signal.SIGTERM, 1)  # one rank is enough: the others agree
    gang.signal(signal.SIGTERM, 1)
    assert gang.wait() == [143, 143], gang.output()
    stopped_at = gang.events("preempted")[0]["step"]
    assert job.checkpoints() == [f"step-{stopped_at:08d}"]
    second = _finish(job, 2)
    assert second.events("resumed")[0]["step"] == stopped_at
    assert [line["step"] for line in job.metrics()] == list(range(1, 13)), "no step was repeated or left out"
    assert job.losses() == unhurt


def test_a_lost_rank_ends_the_others_at_once_as_a_symptom(new_job: Callable[..., Job]) -> None:
    job = new_job(training={"steps": 1000}, checkpoint={"everySteps": 3})
    gang = job.launch(4)
    gang.until_step(4)
    gang.signal(signal.SIGKILL, 2)
    assert gang.wait(seconds=60) == [75, 75, -9, 75], gang.output()
    for rank in (0, 1, 3):
        assert gang.error(rank)["traceback"]


def test_a_finished_run_ends_at_once_and_a_longer_one_goes_on(new_job: Callable[..., Job]) -> None:
    job = new_job()
    _finish(job, 2)
    lines = len(job.metrics())
    again = _finish(job, 2)
    assert again.events("finished")[0]["already"] is True
    assert len(job.metrics()) == lines
    longer = _finish(job, 2, changes={"training": {"steps": 8}})
    assert longer.events("resumed")[0]["step"] == 6
    assert "the spec has changed" in longer.output()
    assert [line["step"] for line in job.metrics()] == list(range(1, 9))


def test_a_store_of_another_model_is_refused_also_where_nothing_is_left_to_train(new_job: Callable[..., Job]) -> None:
    job = new_job()
    _finish(job, 1)
    other = job.run(1, changes={"model": {"layers": 1}})
    assert other.wait() == [64], other.output()
    assert "spec.model.layers: 1" in other.error()["message"]


def test_the_moments_of_another_optimizer_are_refused(new_job: Callable[..., Job]) -> None:
    job = new_job()
    _finish(job, 1)
    other = job.run(1, changes=merged(LION, {"training": {"steps": 8}}))
    assert other.wait() == [64], other.output()
    assert "spec.training.optimizer.name: 'lion'" in other.error()["message"]


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1-rank": (1, {}),
    "shard-2": (2, {}),
    "replicate-2-x-shard-2": (4, {"replicate": 2}),
    "tensor-2": (2, {"tensor": 2}),
    "shard-2-x-tensor-2": (4, {"tensor": 2}),
    "context-2-x-tensor-2": (4, {"context": 2, "tensor": 2}),
    "pipeline-2-x-shard-2": (4, {"pipeline": 2}),
    "zero-1-x-replicate-2": (4, {"zeroStage": 1, "replicate": 2}),
    "zero-0": (2, {"zeroStage": 0}),
}

UNLIKE = {name: layout for name, layout in LAYOUTS.items() if name not in ("shard-2", "tensor-2", "zero-0")}
"""For the matrix of all by all: those whose boxes another one's do not contain as a simpler case."""

EXPERTS: dict[str, Any] = {
    "model": {"moe": {"experts": 4, "ffnDim": 32, "sharedExperts": 1, "biasRate": 0.01, "balanceCoefficient": 0.1}}
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1-rank": (1, {}),
    "expert-2-x-shard-2": (4, {"expert": 2}),
    "expert-2-x-pipeline-2": (4, {"expert": 2, "pipeline": 2}),
    "tensor-2": (2, {"tensor": 2}),
    "zero-1-x-expert-2": (4, {"zeroStage": 1, "expert": 2}),
}
MUON = {"training": {"optimizer": {"name": "muon", "learningRate": 1e-3}}}
LION = {"training": {"optimizer": {"name": "lion", "learningRate": 1e-4}, "schedule": {"kind": "wsd"}}}


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("tensor-2", {}),
        ("context-2-x-tensor-2", {}),
        ("pipeline-2-x-shard-2", {}),
        ("shard-2", LION),
        ("expert-2-x-pipeline-2", EXPERTS),
        ("zero-1-x-replicate-2", {"training": {"precision": "bf16"}}),
        ("zero-0", {}),
        ("shard-2-x-tensor-2", MUON),
    ],
    ids=["t2", "c2t2", "p2s2", "lion", "e2p2", "zero1", "zero0", "muon"],
)
def test_every_layout_resumes_to_the_bit(new_job: Callable[..., Job], layout: str, more: dict[str, Any]) -> None:
    ranks, parallelism = {**EXPERT_LAYOUTS, **LAYOUTS}[layout]
    changes = merged({"parallelism": parallelism}, more)
    whole, halves = new_job("whole", **TWELVE), new_job("halves", **TWELVE)
    _finish(whole, ranks, changes=changes)
    gang = halves.launch(ranks, changes=changes)
    gang.until_step(7)
    gang.signal(signal.SIGKILL, ranks - 1)
    gang.wait()
    _finish(halves, ranks, changes=changes)
    assert halves.losses() == whole.losses()


def _axes(ranks: int, parallelism: dict[str, int]) -> tuple[int, ...]:
    """Return what gives a rank its place, and so its random generators."""
    return ranks, *(parallelism.get(axis, 1) for axis in ("tensor", "context", "pipeline", "expert"))


@pytest.mark.parametrize(("layouts", "model"), [(UNLIKE, {}), (EXPERT_LAYOUTS, EXPERTS)], ids=["dense", "experts"])
def test_every_layout_takes_over_the_checkpoints_of_every_other(
    new_job: Callable[..., Job], tmp_path: Path, layouts: dict[str, tuple[int, dict[str, int]]], model: dict[str, Any]
) -> None:
    six: dict[str, Any] = {"training": {"steps": 6}, "checkpoint": {"everySteps": 6}}
    twelve = merged(TWELVE, model)
    # The schedule of the first six steps is that of a six-step run.
    same = new_job("same-size", **twelve)
    _finish(same, 1, changes=six)
    _finish(same, 1)
    for before, (ranks, parallelism) in layouts.items():
        saved = new_job(f"from-{before}", **twelve)
        _finish(saved, ranks, changes=merged(six, {"parallelism": parallelism}))
        for after, (other_ranks, other_parallelism) in layouts.items():
            taken = replace(saved, folder=tmp_path / f"{before}-to-{after}")
            shutil.copytree(saved.folder, taken.folder)
            resumed = _finish(taken, other_ranks, changes={"parallelism": other_parallelism})
            assert resumed.events("resumed")[0]["step"] == 6
            same_layout = _axes(ranks, parallelism) == _axes(other_ranks, other_parallelism)
            assert ("random generators start anew" in resumed.output()) != same_layout
            for found, expected in zip(taken.losses(), same.losses(), strict=True):
                assert abs(found - expected) <= 1e-6, (before, after)


def test_a_rank_without_a_row_of_some_parameters_saves_and_loads(new_job: Callable[..., Job]) -> None:
    """Of the 16 rows of wk, five ranks hold three each, one holds one, and the last none."""
    sevens: dict[str, Any] = {"training": {"steps": 6, "globalBatchSize": 7}, "checkpoint": {"everySteps": 3}}
    alone, spread = new_job("alone", **sevens), new_job("spread", **sevens)
    _finish(alone, 1)
    _finish(spread, 7, changes={"training": {"steps": 3}})
    for ranks, steps in ((1, 4), (7, 6)):
        _finish(spread, ranks, changes={"training": {"steps": steps}})
    assert len(spread.losses()) == 6
    for step, (found, expected) in enumerate(zip(spread.losses(), alone.losses(), strict=True), 1):
        assert step > 3 or abs(found - expected) <= 5e-6  # later the schedules differ
    whole = new_job("whole", **sevens)
    _finish(whole, 7)
    for found, expected in zip(whole.losses(), alone.losses(), strict=True):
        assert abs(found - expected) <= 5e-6
