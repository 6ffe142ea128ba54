"""The real trainer, in whose first attempt rank 1 waits for ever for the data of one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmtrain_api.launch import RankLaunch
from llmtrain_trainer import rank
from llmtrain_trainer.parallel.build import RankModel

STUCK_STEP = 8


def run(launch: RankLaunch) -> int:
    """Run the rank; the first one that gets nothing blocks in Python, in a system call."""
    if launch.attempt == 1 and launch.global_rank == 1:
        _block(Path(launch.error_file).with_name("fifo"))
    return rank.run(launch)


def _block(fifo: Path) -> None:
    train, calls = RankModel.forward_backward, 0
    os.mkfifo(fifo)

    def forward_backward(self: RankModel, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == STUCK_STEP:
            wait_for_data(fifo)
        return train(self, *arguments, **named)

    RankModel.forward_backward = forward_backward  # type: ignore[method-assign]


def wait_for_data(fifo: Path) -> None:
    """Wait for somebody who never writes."""
    fifo.read_bytes()
