"""A mixture of 32 experts, top-2, beside a dense model, on the same tokens: FLOPs, time per step, loss.

How the two are matched: the same text, batches, order, dim, layers, heads, optimizer and schedule. The dense model's
feed-forward is as wide as makes the mixture cost 22 % of its FLOPs per token (attention and output matrix counted), so
that a mixture of equal quality saves 78 %; it has three times the dense parameters. Both train at
the same time, one rank and one core each, so that whatever else this machine does slows both; the time per step is the
median over the steps that fall into the time in which both were at work. The loss compared is the mean of the last
tenth of the steps, cross-entropy alone: the router's own losses are not in it.

    python -m benchmarks.moe_vs_dense [--steps 400] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llmtrain_api.presets import ModelDimensions
from llmtrain_api.spec_model import Model

SIZE = {"dim": 128, "layers": 4, "heads": 4, "kvHeads": 4, "vocabSize": 320, "sequenceLength": 128}
DENSE_WIDTH = 4096
MOE = {"experts": 32, "topK": 2, "ffnDim": 344}
AIMS = {"flops saved": 0.78, "times faster": 2.4, "loss worse": 0.012}


def models() -> dict[str, dict[str, Any]]:
    """Return spec.model of both."""
    return {"dense": {**SIZE, "ffnDim": DENSE_WIDTH}, "mixture": {**SIZE, "ffnDim": DENSE_WIDTH, "moe": MOE}}


def dimensions(model: dict[str, Any]) -> ModelDimensions:
    return Model.model_validate(model).dimensions()


def launch(folder: Path, name: str, model: dict[str, Any], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start one rank that trains the model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = {
        "workers": {"image": "none", "accelerator": {"count": 0}, "device": "cpu"},
        "model": model,
        "training": {
            "steps": options.steps,
            "globalBatchSize": options.batch,
            "microBatchSize": options.batch,
            "precision": options.precision,
            "optimizer": {"learningRate": options.learning_rate},
            "schedule": {"warmupSteps": options.steps // 20},
        },
        "data": {"sources": [{"uri": "builtin://python-stdlib"}]},
        "checkpoint": {"store": f"file://{folder}/{name}", "everySteps": options.steps},
    }
    place = {"globalRank": 0, "localRank": 0, "nodeRank": 0, "worldSize": 1, "localWorldSize": 1}
    address = {"masterAddress": "127.0.0.1", "masterPort": port, "errorFile": f"{folder}/{name}.error"}
    document = {"runId": f"benchmark/{name}", "attempt": 1, "spec": spec, **place, **address}
    environment = {"LLMTRAIN_LAUNCH": json.dumps(document), "LLMTRAIN_WORK_DIR": f"{folder}/work-{name}"}
    return subprocess.Popen(
        [sys.executable, "-m", "llmtrain_trainer"],
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def compare(dense: list[dict[str, Any]], mixture: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of two runs on the same tokens."""
    first = max(dense[0]["time"], mixture[0]["time"])
    last = min(dense[-1]["time"], mixture[-1]["time"])
    seconds = [
        statistics.median(step["step_seconds"] for step in run if first < step["time"] <= last)
        for run in (dense, mixture)
    ]
    tail = max(1, len(dense) // 10)
    losses = [statistics.fmean(step["loss"] for step in run[-tail:]) for run in (dense, mixture)]
    flops = [dimensions(model).flops_per_token() for model in models().values()]
    return {
        "dense_seconds": seconds[0],
        "mixture_seconds": seconds[1],
        "times faster": seconds[0] / seconds[1],
        "flops saved": 1 - flops[1] / flops[0],
        "dense_loss": losses[0],
        "mixture_loss": losses[1],
        "loss worse": losses[1] / losses[0] - 1,
        "busiest expert": mixture[-1]["expert_load"],
    }


def report(figures: dict[str, float], options: argparse.Namespace) -> None:
    for name, model in models().items():
        dims = dimensions(model)
        print(
            f"{name:<8} {dims.parameter_count() / 1e6:6.1f} M parameters, {dims.active_parameter_count() / 1e6:5.2f} M "
            f"at work on a token, {dims.flops_per_token() / 1e6:6.2f} MFLOP forward per token"
        )
    tokens = options.steps * options.batch * SIZE["sequenceLength"]
    print(
        f"{options.steps} steps, {tokens / 1e6:.2f} M tokens each, {options.precision}, one core each, at the same time"
    )
    print(f"seconds per step: dense {figures['dense_seconds']:.3f}, mixture {figures['mixture_seconds']:.3f}")
    print(f"loss, last tenth: dense {figures['dense_loss']:.4f}, mixture {figures['mixture_loss']:.4f}")
    print(f"busiest expert at the end: {figures['busiest expert']:.2f} x its share")
    print(f"FLOPs saved   {figures['flops saved']:7.1%}   aim {AIMS['flops saved']:.0%} or more")
    print(f"times faster  {figures['times faster']:7.2f}   aim {AIMS['times faster']} or more")
    print(f"loss worse    {figures['loss worse']:7.2%}   aim {AIMS['loss worse']:.1%} or less")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe-vs-dense-") as place:
        folder = Path(place)
        runs = {name: launch(folder, name, model, options) for name, model in models().items()}
        codes = {name: run.wait() for name, run in runs.items()}
        if any(codes.values()):
            print(f"a run failed: {codes}; see its output above", file=sys.stderr)
            return 1
        figures = compare(*(steps_of(folder, name) for name in runs))
    report(figures, options)
    if options.json:
        options.json.write_text(json.dumps({**figures, "steps": options.steps, "aims": AIMS}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
