"""A real trainer's rank that is stuck in Python: its agent tells where, and kills it when it is ordered to."""

from __future__ import annotations

from llmtrain_api.sync import SyncRequest
from tests.integration.agent.harness import Stage, has_ended, on_stage, run_order
from tests.integration.agent.stuck_trainer import STUCK_STEP
from tests.integration.agent.test_real_trainer import STEPS, spec
from tests.support.ports import free_port


def all_answered(report: SyncRequest) -> bool:
    return len(report.beats) == 2 and all(beat.probed and beat.overdue for beat in report.beats)


@on_stage
async def test_stuck_rank_and_the_one_that_waits_for_it_show_their_stacks(stage: Stage) -> None:
    training = {**spec(stage.folder), "failurePolicy": {"hang": {"floorSeconds": 2}}}
    agent = stage.agent(LLMTRAIN_RANK_ENTRY="tests.integration.agent.stuck_trainer:run")
    await stage.coordinator.until(lambda r: r.warm, "the fork-server is warm", seconds=180)
    await stage.coordinator.give(run_order(1, training, master_port=free_port()))
    told = (await stage.coordinator.until(all_answered, "both ranks are overdue and have shown where they are")).report
    waiting, stuck = sorted(told.beats, key=lambda beat: beat.global_rank)
    assert (stuck.phase, stuck.step) == ("data_loading", STUCK_STEP)
    assert "in wait_for_data" in "".join(stuck.stack.splitlines()[:3]), stuck.stack
    assert waiting.step == STUCK_STEP and waiting.phase in ("forward", "backward", "sync_wait"), waiting
    assert "torch/distributed/" in waiting.stack, waiting.stack
    line = agent.event("hang_suspected")
    assert line and "most recent call first" in line["stacks"] and line["flight_records"] == []
    before = len(stage.coordinator.received)
    await stage.coordinator.give(run_order(2, training, master_port=free_port()))
    done = (await stage.coordinator.until(lambda r: has_ended(r, 2), "attempt 2 ends", before)).report
    assert [rank.exit_code for rank in done.ranks] == [0, 0], agent.output.read_text()[-4000:]
    assert done.progress and done.progress.step == STEPS
