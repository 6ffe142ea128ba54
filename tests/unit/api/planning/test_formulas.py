"""The formulas beside numbers that somebody else published, or that can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain_api.planning.estimate import Estimate, estimate
from llmtrain_api.planning.layout import Layout, Workload, stages_by_rank
from llmtrain_api.planning.machine import MACHINES, Machine
from llmtrain_api.planning.memory import Weights
from llmtrain_api.planning.schedule import StageTimes, idle_seconds, waiting
from llmtrain_api.presets import PRESETS
from llmtrain_api.spec import LLMTrainJobSpec, Parallelism, PipelineSchedule


def _work(preset: str, ranks: int, batch: int, **training: Any) -> Workload:
    workers = {"image": "none", "replicas": max(1, ranks // 8), "ranksPerWorker": min(8, ranks)}
    return Workload.of(
        LLMTrainJobSpec.model_validate(
            {
                "workers": workers,
                "model": {"preset": preset},
                "training": {"steps": 1, "globalBatchSize": batch, **training},
                "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
                "checkpoint": {"store": "file:///store"},
            }
        )
    )


def _estimate(work: Workload, machine: str = "h100", **axes: Any) -> Estimate:
    return estimate(work, Parallelism.model_validate(axes), MACHINES[machine])


@pytest.mark.parametrize(
    ("preset", "axes"),
    [
        ("demo", {}),
        ("llama-405b", {"pipeline": 16}),
        ("llama-70b", {"pipeline": 8, "pipelineSchedule": "ZBV"}),
        ("moe-32x7b", {"pipeline": 4}),
    ],
)
def test_the_stages_hold_every_parameter_once(preset: str, axes: dict[str, Any]) -> None:
    work, parallelism = _work(preset, 16, 256), Parallelism.model_validate(axes)
    weights = Weights(Layout(work, parallelism))
    stages = [stage for rank in stages_by_rank(work.dims, parallelism) for stage in rank]
    assert sum(weights.of(stage).total for stage in stages) == work.dims.parameter_count()


def test_states_are_shared_out_over_all_ranks() -> None:
    """ZeRO (Rajbhandari et al. 2020): 16 bytes of states for each parameter, here all in fp32."""
    work = _work("llama-8b", 8, 8)
    memory = _estimate(work).memory
    own = PRESETS["llama-8b"].parameter_count() / 8
    assert memory.optimizer == pytest.approx(8 * own)
    assert memory.weights > 4 * own
    assert memory.gradients > 4 * own
    assert _estimate(_work("llama-8b", 8, 8, optimizer={"name": "lion"})).memory.optimizer == pytest.approx(4 * own)


def test_more_of_zero_takes_less_memory_and_sends_more() -> None:
    whole, *sharded = (_estimate(_work("llama-8b", 8, 8), zeroStage=stage) for stage in (0, 1, 2, 3))
    memory = [one.memory.total for one in (whole, *sharded)]
    assert memory == sorted(set(memory), reverse=True)
    sent = [one.sent["shard"] for one in sharded]
    assert sent[0] == sent[1] < sent[2]
    # An all-reduce is two moves of fp32; sums that go to shards, and a gather in bf16, are one and a half.
    assert whole.sent["shard"] == pytest.approx(4 / 3 * sent[0])


def test_gradients_that_wait_are_whole_whatever_the_stage() -> None:
    one, two, three = (_estimate(_work("llama-8b", 8, 32), zeroStage=stage) for stage in (1, 2, 3))
    parameters = PRESETS["llama-8b"].parameter_count()
    assert min(found.memory.gradients for found in (one, two, three)) >= 4 * parameters
    assert one.sent["shard"] < two.sent["shard"] < three.sent["shard"]


def test_a_single_data_rank_keeps_one_copy_of_fp32_weights() -> None:
    parameters = PRESETS["tiny"].parameter_count()
    for stage in (0, 1):
        memory = _estimate(_work("tiny", 1, 1, precision="fp32"), zeroStage=stage).memory
        assert memory.weights == 4 * parameters


def test_muon_remembers_little_and_computes_more() -> None:
    adamw, muon = (_estimate(_work("llama-8b", 8, 8, optimizer={"name": name})) for name in ("adamw", "muon"))
    dims = PRESETS["llama-8b"]
    ends = 2 * dims.vocab_size * dims.dim + dims.dim
    assert muon.memory.optimizer == pytest.approx(4 * (dims.parameter_count() + ends) / 8)
    assert muon.step_seconds > adamw.step_seconds
    assert muon.sent["shard"] > adamw.sent["shard"]
    alone = _estimate(_work("tiny", 1, 1, optimizer={"name": "muon"}))
    assert "shard" not in alone.sent


def test_fp16_is_planned_as_bf16_is() -> None:
    fp16, bf16 = (_estimate(_work("llama-8b", 8, 8, precision=kind)) for kind in ("fp16", "bf16"))
    assert fp16 == bf16


def test_recomputation_trades_memory_for_time() -> None:
    none, selective, full = (
        _estimate(_work("llama-8b", 8, 8), recompute=kind) for kind in ("none", "selective", "full")
    )
    assert none.memory.activations > selective.memory.activations > full.memory.activations
    assert none.step_seconds < selective.step_seconds < full.step_seconds
    assert full.mfu < none.mfu


def test_tensor_parallel_sends_what_megatron_sends() -> None:
    """Four moves of the residual stream a layer and direction, (n - 1) / n of it each (Korthikanti et al. 2022)."""
    work = _work("llama-8b", 8, 1)
    dims = work.dims
    stream = 2 * dims.sequence_length * dims.dim * 7 / 8
    layers = 2 * 4 * dims.layers * stream
    sent = _estimate(work, tensor=8).sent["tensor"]
    assert layers < sent < 1.02 * layers


def test_fsdp_gathers_twice_and_reduces_once() -> None:
    """ZeRO-3 (Rajbhandari et al. 2020): gathers for forward and backward, here in bf16, and a reduction in fp32."""
    work = _work("llama-8b", 8, 8)
    assert _estimate(work).sent["shard"] == pytest.approx((2 + 2 + 4) * work.dims.parameter_count() * 7 / 8)
    assert _estimate(work, zeroStage=2).sent["shard"] == pytest.approx((2 + 4) * work.dims.parameter_count() * 7 / 8)


def test_torchtitan_on_8_h100() -> None:
    """Llama 3.1 8B, FSDP, eager, selective recomputation, 2 sequences of 8,192 per GPU: 5,762 tokens/s per GPU.

    Its selective kind repeats every second matrix product, so the speed lies between our selective and full.
    """
    work = _work("llama-8b", 8, 16, microBatchSize=2)
    selective, full = (_estimate(work, recompute=kind).tokens_per_second / 8 for kind in ("selective", "full"))
    assert full / 1.25 < 5762 < selective
    assert (selective + full) / 2 == pytest.approx(5762, rel=0.25)


def test_a_pipeline_of_1f1b_idles_as_narayanan_says() -> None:
    """(p - 1) / m of the time without idling (Narayanan et al. 2021, section 2.2)."""
    found = _estimate(_work("llama-8b", 4, 32), pipeline=4)
    assert found.bubble / (1 - found.bubble) == pytest.approx(3 / 32, rel=0.05)


TIMES = StageTimes(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("schedule", "idle", "held"),
    [
        ("GPipe", 9.0, [16, 16, 16, 16]),
        ("1F1B", 9.0, [4, 3, 2, 1]),
        ("Interleaved1F1B", 4.5, [5.5, 4.5, 3.5, 2.5]),
        ("ZBV", 0.0, [4, 4, 4, 4]),
        ("DualPipeV", 3.0, [4.5, 4.5, 4.5, 4.5]),
    ],
)
def test_schedules_idle_and_hold(schedule: PipelineSchedule, idle: float, held: list[float]) -> None:
    assert idle_seconds(schedule, 4, TIMES) == pytest.approx(idle)
    assert [waiting(schedule, rank, 4, 16) for rank in range(4)] == held


def test_a_group_across_workers_is_as_fast_as_its_ports() -> None:
    h100 = MACHINES["h100"]
    assert h100.bandwidth(8, 1, 8) == h100.inside
    assert h100.bandwidth(16, 1, 8) == min(h100.inside, 8 * h100.outside)
    assert h100.bandwidth(2, 8, 8) == h100.outside


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_machine_is_possible(machine: Machine) -> None:
    assert 0 < machine.efficiency < 1
    assert machine.outside <= machine.inside <= machine.memory_bandwidth
    assert machine.fp32_flops <= machine.flops


def test_ranks_share_the_cores_of_a_cpu() -> None:
    cpu = MACHINES["cpu"]
    assert cpu.rank_flops(4, 4) == cpu.rank_flops(4, 1) * cpu.cores / 4  # type: ignore[operator]
    assert cpu.rank_memory(4) == cpu.memory_bytes / 4
