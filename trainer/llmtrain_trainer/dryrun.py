"""`python -m llmtrain_trainer.dryrun < SPEC`: what single ranks of a job hold, without the job's machines.

A job's spec (JSON) comes in at standard input, one JSON object goes out. The ranks' own code cuts and shards the model:
parameters lie on the meta device, which has shapes and no memory, and the other ranks are a fake process group, whose
collectives return at once. So a model for 1,024 GPUs is laid out in seconds by one process. A spec that cannot be laid
out is said in one line with exit code 64.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmtrain_api.constants import ExitCode
from llmtrain_api.launch import RankLaunch
from llmtrain_api.meta import ApiModel
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import UserError
from llmtrain_trainer.optim.sharded import MOMENTS, rule_of
from llmtrain_trainer.parallel.build import RankModel


class RankHolding(ApiModel):
    """What one rank keeps from step to step."""

    rank: int
    stages: list[int]
    parameters: int
    """Elements that lie on this rank."""
    share: float
    """The same, each divided by the number of ranks that hold it too: summed over all ranks it is the whole model."""
    parameter_bytes: int
    """Of them in fp32. Stages 0 and 1 of ZeRO compute with a whole copy in training.precision, which is not counted."""
    gradient_bytes: int
    optimizer_bytes: int


class DryRun(ApiModel):
    """What a dry run found."""

    world_size: int
    parameters: int
    """Of the whole model."""
    ranks: list[RankHolding]
    seconds: float
    peak_memory_bytes: int
    """Of the largest process that laid ranks out, not of a rank."""


def dry_run(spec: LLMTrainJobSpec, ranks: list[int] | None = None) -> DryRun:
    """Lay out some ranks; left out: the first rank, and the first of the last pipeline stage.

    Raises:
        UserError: the ranks, or the model, cannot be laid out so.
    """
    started = time.perf_counter()
    first = _config(spec, 0)
    if ranks is None:
        ranks = sorted({0, spec.world_size() - spec.world_size() // spec.parallelism.pipeline})
    # A process for each: torch remembers where a mesh's rank lies beyond the end of its process group.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        holdings = pool.map(_holding, [_config(spec, rank) for rank in ranks], chunksize=1)
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return DryRun(
        world_size=spec.world_size(),
        parameters=first.dimensions.parameter_count(),
        ranks=holdings,
        seconds=round(time.perf_counter() - started, 3),
        peak_memory_bytes=max(peaks) * 1024,
    )


def _holding(config: RunConfig) -> RankHolding:
    torch.set_num_threads(1)  # a forked process has none of its parent's threads, and would wait for them
    launch = config.launch
    dist.init_process_group("fake", rank=launch.global_rank, world_size=launch.world_size, store=FakeStore())
    model = RankModel(config)
    elements, share, size, remembered = 0, 0.0, 0, 0
    for name, shard in model.shards.items():
        piece = model.pieces[name]
        own = math.prod(piece.sizes)
        elements += own
        share += own / piece.copies
        size += own * shard.element_size()
        rule = rule_of(config.spec.training.optimizer.name, name, piece)
        remembered += own * shard.element_size() * len(MOMENTS[rule])
    return RankHolding(
        rank=config.launch.global_rank,
        stages=sorted(model.stages),
        parameters=elements,
        share=share,
        parameter_bytes=size,
        gradient_bytes=size,  # a reduced gradient has its parameter's type
        optimizer_bytes=remembered,
    )


def _config(spec: LLMTrainJobSpec, rank: int) -> RunConfig:
    """Return a rank's view of the job; what is about its machine is not true, and not read."""
    on_cpu = spec.model_copy(update={"workers": spec.workers.model_copy(update={"device": "cpu"})})
    local = spec.ranks_per_worker()
    launch = RankLaunch(
        run_id="dry/run",
        attempt=0,
        global_rank=rank,
        local_rank=rank % local,
        node_rank=rank // local,
        world_size=spec.world_size(),
        local_world_size=local,
        master_address="",
        master_port=0,
        spec=on_cpu.to_wire(),
        error_file="",
    )
    return replace(RunConfig.of(launch), device=torch.device("meta"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m llmtrain_trainer.dryrun", description=__doc__)
    parser.add_argument("--rank", type=int, action="append", help="a rank to lay out; repeatable")
    options = parser.parse_args(arguments)
    try:
        spec = LLMTrainJobSpec.model_validate(json.load(sys.stdin))
        wrong = [rank for rank in options.rank or () if not 0 <= rank < spec.world_size()]
        if wrong:
            parser.error(f"--rank {wrong[0]}: the job has the ranks 0 to {spec.world_size() - 1}; choose among them")
        found = dry_run(spec, options.rank)
    except (UserError, ValidationError, json.JSONDecodeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return int(ExitCode.USER_ERROR)
    print(json.dumps(found.to_wire()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
