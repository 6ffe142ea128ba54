"""Tokens per second of our trainer beside plain DDP, torchtitan and DeepSpeed: the same Llama, in the same run.

    .venv/bin/python -m benchmarks.trainer_vs_peers [--rounds 9] [--steps 3] [--only fp32/zero1 bf16/tensor] [--quick]

Two ranks of one thread each on CPUs and gloo. All contenders of a row start from the same weights, read the same tokens
in the same steps, and clip and step AdamW alike; before anything is timed, their losses have to agree. Then they take
turns of a few steps, in a new order each round, while all others sleep. A ratio is the median over rounds of the ratio
within one round, so that what else the machine does hits both; the one after it is of the quickest turns, which other
work has slowed least. torchtitan and DeepSpeed have environments of their
own, in ~/.cache/llmtrain/peers, made on first use. What every contender runs: benchmarks/peers/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.contender import Contender, ContenderError, Program
from benchmarks.peers.turns import Task
from llmtrain_api.launch import RankLaunch
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.data import cache as token_cache
from llmtrain_trainer.data.loader import Loader
from llmtrain_trainer.data.order import SampleOrder
from llmtrain_trainer.data.sources import open_sources
from llmtrain_trainer.data.tokenizer import open_tokenizer
from llmtrain_trainer.model.init import fill, standard_deviation
from llmtrain_trainer.model.transformer import Transformer
from tests.support.ports import free_port

REPORT = Path(__file__).parents[1] / "build" / "trainer_vs_peers.json"
LAYOUTS = {"zero1": "ZeRO-1", "zero3": "ZeRO-3", "tensor": "TP 2", "pipeline": "PP 2"}
PARALLELISM: dict[str, dict[str, Any]] = {
    "zero1": {"zeroStage": 1},
    "zero3": {"zeroStage": 3},
    "tensor": {"tensor": 2, "zeroStage": 1},
    "pipeline": {"pipeline": 2, "zeroStage": 1},
}
OURS, DDP, TITAN, DEEPSPEED = "ours", "DDP", "torchtitan", "DeepSpeed"
CANNOT = {
    (DDP, "zero3"): "DDP does not shard",
    (DDP, "tensor"): "DDP does not cut matrices",
    (DDP, "pipeline"): "DDP has no stages",
}
WARM_STEPS = 3
TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2}
"""Largest difference of a loss of the first steps; bf16 rounds at other places in each contender."""
AIM_PEERS, AIM_DDP = 1.0, 0.97


@dataclass
class Row:
    """What one layout in one precision gave."""

    precision: str
    layout: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of a step, in each round."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def tokens_per_second(self, name: str, tokens: int) -> float:
        return tokens / statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        """Return how many times faster than `name` we are."""
        return statistics.median(b / a for a, b in zip(self.seconds[OURS], self.seconds[name], strict=True))

    def ratio_at_best(self, name: str) -> float:
        """Return the same of the quickest turns."""
        return min(self.seconds[name]) / min(self.seconds[OURS])

    def best_peer(self) -> str | None:
        """Return the fastest of the peers that shard; DDP is no peer but a baseline."""
        peers = [name for name in (TITAN, DEEPSPEED) if name in self.seconds]
        return min(peers, key=self.ratio, default=None)


def specification(task: Task) -> dict[str, Any]:
    """Return our job of the task."""
    return {
        "workers": {"image": "none", "accelerator": {"count": 0}, "ranksPerWorker": task.ranks, "device": "cpu"},
        "model": {
            "dim": task.dim,
            "layers": task.layers,
            "heads": task.heads,
            "kvHeads": task.heads,
            "ffnDim": task.ffn_dim,
            "vocabSize": task.vocabulary,
            "sequenceLength": task.length,
            "ropeTheta": task.theta,
            "normEpsilon": task.norm_epsilon,
        },
        "parallelism": PARALLELISM[task.layout],
        "training": {
            "steps": task.steps,
            "globalBatchSize": task.batch,
            "microBatchSize": task.micro_batch,
            "precision": task.precision,
            "optimizer": {
                "learningRate": task.rate,
                "beta1": task.beta1,
                "beta2": task.beta2,
                "epsilon": task.epsilon,
                "weightDecay": 0.0,
                "gradientClipNorm": task.clip,
            },
            "schedule": {"kind": "constant"},
        },
        "data": {"sources": [{"uri": f"file://{task.folder}/corpus"}]},
        "checkpoint": {"store": f"file://{task.folder}/store", "everySteps": task.steps},
    }


def prepare(task: Task) -> Path:
    """Write text, the tokens that our trainer makes of it for every step, and first weights; return our launch."""
    folder = Path(task.folder)
    (folder / "corpus").mkdir()
    text = "".join(f"{n} squared is {n * n}, and its cube is {n**3}.\n" for n in range(20000))
    (folder / "corpus" / "text.txt").write_text(text)
    launch = {
        **{"runId": "benchmark/peers", "attempt": 1, "spec": specification(task), "globalRank": 0, "localRank": 0},
        **{"nodeRank": 0, "worldSize": task.ranks, "localWorldSize": task.ranks, "masterAddress": "127.0.0.1"},
        **{"masterPort": free_port(), "errorFile": f"{folder}/error"},
    }
    file = folder / "launch.json"
    file.write_text(json.dumps(launch))
    config = RunConfig.of(RankLaunch.model_validate(launch))
    sources, seed = open_sources(config), config.spec.training.seed
    tokens = token_cache.build(folder / "tokens", "all", sources, open_tokenizer(config)).map()
    loader = Loader(tokens, SampleOrder((len(tokens) - 1) // task.length, seed), task.length)
    steps = [loader.batch(range(step * task.batch, (step + 1) * task.batch)) for step in range(task.steps)]
    torch.save(torch.stack([torch.cat((i, t[:, -1:]), dim=1) for i, t in steps]), folder / "tokens.pt")
    weights = {name: torch.ones(p.shape) for name, p in Transformer(config.dimensions).named_parameters()}
    for name, weight in weights.items():
        if std := standard_deviation(name, task.layers):
            fill(weight, (0, 0), tuple(weight.shape), name=name, seed=seed, std=std)
    torch.save(weights, folder / "weights.pt")
    return file


def programs(launch: Path) -> list[Program]:
    return [
        Program(OURS, "benchmarks.peers.ours", arguments=(str(launch),)),
        Program(DDP, "benchmarks.peers.ddp"),
        Program(TITAN, "benchmarks.peers.titan", "torchtitan"),
        Program(DEEPSPEED, "benchmarks.peers.with_deepspeed", "deepspeed"),
    ]


def measure(precision: str, layout: str, options: argparse.Namespace) -> Row:
    """Run all contenders of a row, in turns."""
    row = Row(precision, layout)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder, ExitStack() as running:
        steps = WARM_STEPS + options.rounds * options.steps + 1  # never to its end, so that nobody saves
        task = Task(folder, layout, precision, steps)
        contenders = []
        for program in programs(prepare(task)):
            reason = CANNOT.get((program.name, layout))
            if reason or (options.contenders and program.name not in options.contenders):
                row.missing[program.name] = reason or "not asked for"
                continue
            contender = running.enter_context(Contender(program, task))
            try:
                contender.turn(WARM_STEPS)
                contenders.append(contender)
            except ContenderError as error:
                print(error, file=sys.stderr)
                row.missing[program.name] = "failed"
        for number in range(options.rounds):
            start = number % len(contenders)
            for contender in contenders[start:] + contenders[:start]:
                row.seconds.setdefault(contender.name, []).append(contender.turn(options.steps) / options.steps)
        row.losses = {contender.name: contender.losses[:WARM_STEPS] for contender in contenders}
    return row


def check_losses(row: Row) -> float:
    """Return by how much the losses of the first steps differ between any two contenders.

    Raises:
        SystemExit: by so much that they did not do the same work.
    """
    worst = max(max(step) - min(step) for step in zip(*row.losses.values(), strict=True))
    if worst > TOLERANCE[row.precision]:
        raise SystemExit(f"{row.precision} {row.layout}: losses differ by {worst:.1e}, no comparison: {row.losses}")
    return worst


def line(row: Row, tokens: int) -> str:
    rates = (
        f"{row.tokens_per_second(name, tokens):>11,.0f}" if name in row.seconds else f"{'-':>11}"
        for name in (OURS, DDP, TITAN, DEEPSPEED)
    )
    best = row.best_peer()
    against_best = f"{row.ratio(best):6.2f} {row.ratio_at_best(best):5.2f} ({best})" if best else "-"
    against_ddp = f"{row.ratio(DDP):6.2f} {row.ratio_at_best(DDP):5.2f}" if DDP in row.seconds else "-"
    return (
        f"{row.precision:<5} {LAYOUTS[row.layout]:<7}{''.join(rates)}  {against_best:<25} {against_ddp:>12} "
        f"{check_losses(row):9.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps in one turn")
    parser.add_argument("--only", nargs="*", metavar="ROW", help="such as fp32/zero1 or bf16/pipeline")
    parser.add_argument("--contenders", nargs="*", choices=(OURS, DDP, TITAN, DEEPSPEED))
    parser.add_argument("--quick", action="store_true", help="three rounds of one step: does it all run?")
    parser.add_argument("--json", type=Path, default=REPORT)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 3, 1
    rows = [(precision, layout) for precision in TOLERANCE for layout in LAYOUTS]
    tokens = Task("", "", "", 0).tokens
    print(f"tokens/s, median of {options.rounds} rounds of {options.steps} steps of {tokens} tokens")
    names = "".join(f"{name:>11}" for name in (OURS, DDP, TITAN, DEEPSPEED))
    print(f"{'':<13}{names}  {'ours / best peer':<25} {'/ DDP':>12} {'losses +-':>9}", flush=True)
    found = []
    for precision, layout in rows:
        if options.only and f"{precision}/{layout}" not in options.only:
            continue
        found.append(measure(precision, layout, options))
        print(line(found[-1], tokens), flush=True)
    reasons = {f"{name}: {why}" for row in found for name, why in row.missing.items()}
    print("\n".join(sorted(reasons)))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
