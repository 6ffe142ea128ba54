"""Our trainer as a job runs it, data, metrics and guard included; only that each step waits for its turn."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.peers.turns import Turns
from llmtrain_api.launch import RankLaunch
from llmtrain_trainer.checkpoint.outcome import Position
from llmtrain_trainer.rank import run
from llmtrain_trainer.train import Trainer


def main() -> int:
    rank = int(os.environ["RANK"])
    launch = RankLaunch.model_validate_json(Path(sys.argv[1]).read_text())
    turns, step = Turns(), Trainer._step

    def in_turn(trainer: Trainer, position: Position) -> tuple[Position, bool]:
        turns.begin()
        after = step(trainer, position)
        turns.end(after[0].loss if rank == 0 and after[0].loss is not None else 0.0)
        return after

    Trainer._step = in_turn
    return run(launch.model_copy(update={"global_rank": rank, "local_rank": rank}))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
