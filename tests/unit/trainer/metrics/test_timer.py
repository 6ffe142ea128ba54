"""A step's time on a GPU: events of the stream, which can be read only once they have happened."""

from __future__ import annotations

import pytest
import torch

from llmtrain_trainer.metrics.timer import PARTS, PIPELINE_PARTS, StepTimer


class StreamEvent:
    """torch.cuda.Event of a stream that is busy until somebody waits for it, for machines without a GPU."""

    happened = 0
    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.position = 0

    def record(self) -> None:
        StreamEvent.recorded += 1
        self.position = StreamEvent.recorded

    def synchronize(self) -> None:
        StreamEvent.happened = max(StreamEvent.happened, self.position)

    def elapsed_time(self, later: StreamEvent) -> float:
        if later.position > StreamEvent.happened:
            raise ValueError("Both events must be completed before calculating elapsed time.")
        return 1000.0 * (later.position - self.position)


def test_a_step_ends_where_ranks_agreed_and_what_is_under_way_counts_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    timer = StepTimer(torch.device("cuda"))
    timer.start()
    for part in PARTS[:5]:
        timer.mark(part)
    happened = StreamEvent.recorded - 1
    total, split = timer.finish()
    assert StreamEvent.happened == happened, "the optimizer's kernels are not waited for"
    assert total == 4.0
    assert split == {**dict.fromkeys(PARTS, 0.0), **dict.fromkeys(PARTS[:4], 1.0)}
    for part in (*PARTS[5:], *PARTS[:5]):
        timer.mark(part)
    total, split = timer.finish()
    assert total == 7.0
    assert split == dict.fromkeys(PARTS, 1.0)


def test_parts_that_come_again_add_up_to_the_step() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    for part in ("data_loading", "forward", "backward", "data_loading", "forward", "backward", "sync_wait"):
        timer.mark(part)
    total, split = timer.finish()
    assert tuple(split) == PARTS and split["optimizer"] == 0.0
    assert sum(split.values()) == pytest.approx(total) and total > 0.0


def test_forward_and_backward_of_a_pipeline_are_one_part() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.start()
    for part in ("data_loading", "pipeline", "sync_wait"):
        timer.mark(part)
    assert tuple(timer.finish()[1]) == PIPELINE_PARTS
