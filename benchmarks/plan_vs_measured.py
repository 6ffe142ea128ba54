"""How far `llmtrain plan` is from what happens: step time and memory of a few layouts, estimated and measured here.

    .venv/bin/python -m benchmarks.plan_vs_measured [--steps 6]

The machine is measured first, once: elementwise operations on one thread, gloo between two ranks, and one step of one
rank, from which the efficiency of matrix products follows. All other layouts are then predicted from these four
numbers. The model is small (29 M parameters, fp32) because this runs on CPUs; ranks have one thread each.

Time is the median of rank 0's steps after the first. Memory is rank 0's highest resident size in a run of its own, less
that of a rank of the model `tiny` in the same layout, which is Python, torch and gloo. In that run the allocator gives
back what is freed at once: what is asked is how much a step holds, not how well malloc reuses it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmtrain_api.planning.estimate import Estimate, estimate
from llmtrain_api.planning.layout import Workload
from llmtrain_api.planning.machine import CPU, Machine
from llmtrain_api.spec import LLMTrainJobSpec
from tests.support.ports import free_port
from tests.support.ranks import Job, RankHost

REPORT = Path(__file__).parents[1] / "build" / "plan_vs_measured.json"
MODEL = {
    "dim": 512,
    "layers": 8,
    "heads": 8,
    "kvHeads": 4,
    "ffnDim": 1536,
    "vocabSize": 4096,
    "sequenceLength": 128,
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"recompute": "full"}),
    (1, {"recompute": "selective"}),
    (2, {}),
    (2, {"zeroStage": 1}),
    (2, {"tensor": 2}),
    (2, {"context": 2}),
    (2, {"pipeline": 2}),
    (2, {"replicate": 2}),
    (4, {}),
    (4, {"tensor": 2, "pipeline": 2}),
    (4, {"pipeline": 4}),
]
LARGE_BYTES = 8 << 20
ROUNDS = 20


@dataclass(frozen=True)
class Row:
    """One layout."""

    ranks: int
    parallelism: dict[str, Any]
    estimated_seconds: float
    measured_seconds: float
    estimated_bytes: float
    measured_bytes: float


def spec_of(ranks: int, parallelism: dict[str, Any], model: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the spec of a run that makes no checkpoint but the last."""
    return {
        "workers": {"image": "none", "accelerator": {"count": 0}, "ranksPerWorker": ranks, "device": "cpu"},
        "model": model,
        "parallelism": parallelism,
        "training": {"steps": steps, "globalBatchSize": 8, "precision": "fp32"},
        "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
        "checkpoint": {"store": "file:///none", "everySteps": steps},
    }


class Hosts:
    """Where ranks are forked from: once as jobs run, once with an allocator that keeps nothing back."""

    def __init__(self) -> None:
        self.time = RankHost()
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        self.memory = RankHost()
        del os.environ["MALLOC_MMAP_THRESHOLD_"]

    def close(self) -> None:
        self.time.close()
        self.memory.close()


def run(host: RankHost, folder: Path, spec: dict[str, Any], ranks: int) -> tuple[float, int]:
    """Train, and return the median step's seconds and rank 0's highest memory before the checkpoint."""
    folder.mkdir()
    own = {name: value for name, value in spec.items() if name != "checkpoint"}
    job = Job(host, folder, {**own, "checkpoint": {"everySteps": spec["checkpoint"]["everySteps"]}})
    job.work_dir = folder.parent / "work"
    gang = job.run(ranks)
    if any(gang.codes.values()):
        raise SystemExit(f"{spec['parallelism']} failed:\n{gang.output()[-3000:]}")
    lines = [line for line in job.metrics() if line["step"] > 1]
    return statistics.median(line["step_seconds"] for line in lines), max(line["memory_bytes"] for line in lines)


def predicted(machine: Machine, spec: dict[str, Any]) -> Estimate:
    parsed = LLMTrainJobSpec.model_validate(spec)
    return estimate(Workload.of(parsed), parsed.parallelism, machine)


# --- the machine -----------------------------------------------------------------------------------------------------


def elementwise_rate() -> float:
    """Return bytes per second of one thread: silu(x) * y, on tensors as large as this model's."""
    x, y = torch.randn(128, 1536), torch.randn(128, 1536)
    seconds = _time(lambda: torch.nn.functional.silu(x) * y)
    return 5 * x.numel() * 4 / seconds  # reads x, writes the gate, reads both, writes the product


def links() -> tuple[float, float]:
    """Return gloo's bytes per second and latency between two ranks of this machine."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "benchmarks.plan_vs_measured", "--links"]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **address, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    answers = [rank.communicate(timeout=120)[0] for rank in ranks]
    found = json.loads(answers[0].splitlines()[-1])
    return found["rate"], found["latency"]


def _measure_links() -> None:
    dist.init_process_group("gloo")
    small, large = torch.zeros(2), torch.zeros(LARGE_BYTES // 4)
    latency = _time(lambda: dist.all_gather_into_tensor(small, small[:1]))
    gather = _time(lambda: dist.all_gather_into_tensor(large, large[: large.numel() // 2]))
    scatter = _time(lambda: dist.reduce_scatter_tensor(large[: large.numel() // 2].clone(), large))
    rate = LARGE_BYTES / 2 / ((gather + scatter) / 2 - latency)
    print(json.dumps({"rate": rate, "latency": latency}))
    dist.destroy_process_group()


def _time(what: Callable[[], object]) -> float:
    for _ in range(3):
        what()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        what()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def calibrated(step_seconds: float, spec: dict[str, Any]) -> Machine:
    """Return this machine, with the efficiency that makes one rank's step last as long as it did."""
    rate, latency = links()
    bandwidth = elementwise_rate()
    bare = replace(CPU, memory_bandwidth=bandwidth, inside=rate, latency=latency, efficiency=1.0)
    fast = predicted(bare, spec).step_seconds
    slow = predicted(replace(bare, efficiency=0.5), spec).step_seconds
    matrices = slow - fast  # at half of the speed they take twice as long, and nothing else changes
    return replace(bare, efficiency=matrices / max(step_seconds - (fast - matrices), 0.1 * step_seconds))


# --- the table -------------------------------------------------------------------------------------------------------


def compare(steps: int) -> tuple[Machine, list[Row]]:
    """Measure the machine and every layout."""
    hosts = Hosts()
    try:
        with tempfile.TemporaryDirectory(prefix="llmtrain-plan-") as name:
            folder, rows = Path(name), []
            machine: Machine | None = None
            for number, (ranks, parallelism) in enumerate(LAYOUTS):
                spec = spec_of(ranks, parallelism, MODEL, steps)
                seconds = run(hosts.time, folder / f"time-{number}", spec, ranks)[0]
                short = spec_of(ranks, parallelism, MODEL, 2)
                memory = run(hosts.memory, folder / f"memory-{number}", short, ranks)[1]
                machine = machine or calibrated(seconds, spec)
                small = spec_of(ranks, parallelism, {"preset": "tiny", "layers": 8, "kvHeads": 4}, 2)
                base = run(hosts.memory, folder / f"base-{number}", small, ranks)[1]
                guess = predicted(machine, spec)
                rows.append(
                    Row(ranks, parallelism, guess.step_seconds, seconds, guess.memory.total, float(memory - base))
                )
                print(_line(rows[-1]), flush=True)
    finally:
        hosts.close()
    assert machine is not None
    return machine, rows


def _line(row: Row) -> str:
    layout = ", ".join(f"{name} {value}" for name, value in row.parallelism.items()) or "sharded"
    time_off = row.estimated_seconds / row.measured_seconds - 1
    memory_off = row.estimated_bytes / row.measured_bytes - 1
    return (
        f"{row.ranks} ranks, {layout:<24} step {row.estimated_seconds:6.2f} s estimated, {row.measured_seconds:6.2f}"
        f" measured ({time_off:+4.0%})   memory {row.estimated_bytes / 1e6:5.0f} MB, {row.measured_bytes / 1e6:5.0f}"
        f" ({memory_off:+4.0%})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--links", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.links:
        _measure_links()
        return 0
    machine, rows = compare(options.steps)
    print(
        f"this machine: efficiency {machine.efficiency:.2f} of {machine.fp32_flops / 1e9:.0f} GFLOP/s, elementwise "
        f"{machine.memory_bandwidth / 1e9:.1f} GB/s, "
        f"gloo {machine.inside / 1e9:.2f} GB/s and {machine.latency * 1e6:.0f} us"
    )
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps({"machine": asdict(machine), "rows": [asdict(row) for row in rows]}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
