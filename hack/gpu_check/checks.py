"""What no CPU can show about a GPU, one function each. On a CPU the same code runs, and speed is not judged."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hack.gpu_check.runs import Bench, Run, RunError, program
from hack.gpu_check.sizes import Sizes
from llmtrain_api.spec_model import Model
from llmtrain_trainer.metrics.speed import device_peak

FIRST_LOSS = 1e-5
"""Relative difference of the first loss, fp32, between GPU and CPU: another order of sums."""
LATER_LOSSES = 1e-3
"""The same after updates, which amplify it."""
BF16_LOSS = 0.02
COMPILED = 1e-4
"""Largest difference of a compiled layer's result or gradients, by the largest element of each."""
KEPT_BY_FULL = {False: 0.7, True: 0.9}
"""The most that a run may hold at its peak under `recompute: full`, by what it holds without; tiny: Python included."""
BESIDE_PLAIN = 0.9
"""The least speed of the trainer beside plain torch's."""
STALL = 0.5
"""The most that training may wait for a checkpoint, by the time until it is committed."""


@dataclass(frozen=True)
class Outcome:
    ok: bool
    figures: str
    """One line."""


def parity(bench: Bench, sizes: Sizes) -> Outcome:
    """The device's losses are the CPU's, up to the order of sums."""
    here = bench.train("fp32", sizes.numerics, sizes.steps).losses
    cpu = bench.train("reference", sizes.numerics, sizes.steps, device="cpu").losses
    first, worst = _difference(here[:1], cpu[:1]), _difference(here, cpu)
    figures = f"fp32 losses: first step {first:.1e} off (at most {FIRST_LOSS:g}), {len(here)} steps {worst:.1e}"
    return Outcome(first <= FIRST_LOSS and worst <= LATER_LOSSES, f"{figures} (at most {LATER_LOSSES:g})")


def bf16(bench: Bench, sizes: Sizes) -> Outcome:
    """Losses in bf16 are close to those in fp32, and fall."""
    exact = bench.train("fp32", sizes.numerics, sizes.steps).losses
    rounded = bench.train("bf16", sizes.numerics, sizes.steps, training={"precision": "bf16"}).losses
    off = _difference(rounded, exact)
    figures = f"losses {off:.1e} off fp32 (at most {BF16_LOSS:g}), {rounded[0]:.3f} -> {rounded[-1]:.3f}"
    return Outcome(off <= BF16_LOSS and rounded[-1] < rounded[0], figures)


def compiled(bench: Bench, sizes: Sizes) -> Outcome:
    """torch.compile takes a layer whole, and gives the same result and gradients."""
    model = sizes.numerics if sizes.tiny else sizes.activations
    found = program("compile", bench.device, json.dumps(model))
    gain = found["eager_seconds"] / found["compiled_seconds"]
    figures = f"a layer {found['worst']:.1e} off (at most {COMPILED:g}), {gain:.2f} times as fast"
    return Outcome(found["worst"] <= COMPILED, figures)


def recomputation(bench: Bench, sizes: Sizes) -> Outcome:
    """Recomputation saves memory, and leaves the loss alone."""
    runs = {kind: _recompute(bench, sizes, kind) for kind in ("none", "selective", "full")}
    peaks = {kind: max(step["memory_bytes"] for step in run.steps) for kind, run in runs.items()}
    losses = {run.losses[0] for run in runs.values()}
    limit = KEPT_BY_FULL[sizes.tiny]
    ok = peaks["full"] <= limit * peaks["none"] and peaks["selective"] < peaks["none"] and len(losses) == 1
    held = ", ".join(f"{kind} {peak / 1e9:.2f} GB" for kind, peak in peaks.items())
    return Outcome(ok, f"peak {held} (full at most {limit:g} of none); first losses equal: {len(losses) == 1}")


def speed(bench: Bench, sizes: Sizes) -> Outcome:
    """The trainer is as fast as the same network in plain torch; peers that are installed are told beside it."""
    run = _speed_run(bench, sizes)
    ours = statistics.median(step["tokens_per_second"] for step in run.steps[len(run.steps) // 2 :])
    rates: dict[str, float | str] = {"ours": ours}
    for peer in ("plain", "transformers", "torchtitan"):
        rates[peer] = _peer(bench, sizes, peer)
    plain = rates["plain"]
    ok = isinstance(plain, float) and (sizes.tiny or ours >= BESIDE_PLAIN * plain)
    told = "; ".join(f"{name} {_rate(bench, sizes, rate)}" for name, rate in rates.items())
    return Outcome(ok, f"{told} (ours at least {BESIDE_PLAIN:g} of plain{', not judged here' if sizes.tiny else ''})")


def metrics(bench: Bench, sizes: Sizes) -> Outcome:
    """A step's record has what only a GPU can give: MFU, memory by the allocator and the driver, a split by events."""
    run = _speed_run(bench, sizes)
    record, on_gpu = run.steps[-1], bench.device == "cuda"
    peak = device_peak(torch.device(bench.device))
    off = abs(sum(record["split"].values()) / record["step_seconds"] - 1)
    wanted = {"allocated", "reserved", "peak", "device_used"} if on_gpu else {"resident", "peak"}
    missing = wanted - set(record["memory"])
    reasons = "".join(
        f", {event['sink']}: {event['reason']}" for event in run.events if event["event"] == "sink_failed"
    )
    mfu = "none" if record["mfu"] is None else f"{record['mfu']:.1%}"
    kinds = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in record["memory"].items())
    shares = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in record["split"].items())
    ok = off < 0.01 and not missing and (record["mfu"] is not None) == (peak is not None)
    return Outcome(ok, f"MFU {mfu}; GB {kinds}{reasons}; ms {shares}")


def checkpoint_overlap(bench: Bench, sizes: Sizes) -> Outcome:
    """Training goes on while a checkpoint, the first, is written."""
    every = 4 if sizes.tiny else 10
    name = f"step-{every:08d}/manifest.json"
    changes: dict[str, Any] = {"checkpoint": {"everySteps": every, "keep": 2}, "training": {"precision": "bf16"}}
    changes["until"] = lambda run: (run.store / name).exists()
    run = bench.train("checkpoint", sizes.checkpoint, every + 2, **changes)
    by_step = {step["step"]: step for step in run.steps}
    begun, done = by_step[every]["time"], json.loads((run.store / name).read_text())["createdAt"]
    stall, write = by_step[every + 1]["split"]["checkpoint"], done - begun
    meanwhile = sum(begun < step["time"] <= done for step in run.steps)
    judged = "not judged here" if sizes.tiny else f"at most {STALL:g} of that"
    figures = f"committed after {write:.2f} s, training waits {stall:.3f} s ({judged}) and makes {meanwhile} steps"
    return Outcome(sizes.tiny or (stall <= STALL * write and meanwhile > 0), figures)


CHECKS: dict[str, Callable[[Bench, Sizes], Outcome]] = {
    "parity": parity,
    "bf16": bf16,
    "compile": compiled,
    "recompute": recomputation,
    "speed": speed,
    "metrics": metrics,
    "checkpoint": checkpoint_overlap,
}


def _difference(some: list[float], others: list[float]) -> float:
    """Return the largest relative difference; infinite where one is no number."""
    pairs = list(zip(some, others, strict=True))
    if not all(value is not None and math.isfinite(value) for pair in pairs for value in pair):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in pairs)


def _speed_run(bench: Bench, sizes: Sizes) -> Run:
    batch = sizes.speed_batch
    training = {"precision": "bf16", "globalBatchSize": batch, "microBatchSize": batch}
    return bench.train("speed", sizes.speed, sizes.steps, training=training)


def _recompute(bench: Bench, sizes: Sizes, kind: str) -> Run:
    batch = sizes.activations_batch
    training = {"precision": "fp32" if sizes.tiny else "bf16", "globalBatchSize": batch, "microBatchSize": batch}
    name, parallelism = f"recompute-{kind}", {"recompute": kind}
    return bench.train(name, sizes.activations, 2 if sizes.tiny else 4, training=training, parallelism=parallelism)


def _peer(bench: Bench, sizes: Sizes, peer: str) -> float | str:
    """Return a peer's tokens per second, or why there are none."""
    if peer != "plain" and importlib.util.find_spec(peer) is None:
        return "not installed"
    try:
        model = json.dumps(sizes.speed)
        found = program(peer, bench.device, model, str(sizes.speed_batch), str(sizes.steps))
    except RunError as error:
        return f"did not run: {error}"
    return float(found["tokens_per_second"])


def _rate(bench: Bench, sizes: Sizes, rate: float | str) -> str:
    if isinstance(rate, str):
        return rate
    peak = device_peak(torch.device(bench.device))
    flops = 3 * Model.model_validate(sizes.speed).dimensions().flops_per_token() * rate
    return f"{rate:,.0f} tokens/s" + (f" = {flops / peak:.1%} MFU" if peak else "")
