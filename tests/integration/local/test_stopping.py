"""However a run ends, no process is left; a run that a user stops goes on from its last step."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from llmtrain_operator.local.prepare import LocalRun
from llmtrain_operator.local.runner import LocalController, LocalView
from tests.integration.local.conftest import Losses, Start
from tests.integration.local.harness import ONE, PATIENCE, Run, bits, eventually

pytestmark = pytest.mark.timeout(600)


def test_a_stopped_run_checkpoints_and_goes_on(new_run: Start, reference_of_one: Losses) -> None:
    run = new_run(**ONE)
    controller = run.start()
    run.wait_for_step(8)
    controller.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    assert not run.processes(), "all have ended before the command does"
    last = run.steps()[-1].step
    assert last < len(reference_of_one)
    assert (run.store / f"step-{last:08d}" / "manifest.json").exists(), "the last step was saved, whatever its number"
    assert run.status()["state"] == "Suspended"
    assert "the same command goes on" in run.status()["message"]
    run.start()
    run.succeed()
    assert bits(run.steps()) == reference_of_one
    assert len(run.steps()) == len(reference_of_one), "no step was made twice"
    assert not run.status().get("failures"), "to stop is no failure"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_other_ways_to_be_told_to_stop(number: signal.Signals, new_run: Start) -> None:
    run = new_run(**ONE, training_steps=100_000)
    controller = run.start()
    run.wait_for_step(2)
    controller.send_signal(number)
    code, output = run.finish()
    assert code == 130, output
    assert not run.processes()
    assert (run.store / f"step-{run.steps()[-1].step:08d}" / "manifest.json").exists()


def test_a_second_signal_kills_ranks_that_do_not_end(new_run: Start) -> None:
    run = new_run(**ONE, failurePolicy_deadlines={"stopSeconds": 3600})
    controller = run.start()
    run.wait_for_step(2)
    for rank in run.ranks().values():
        rank.suspend()
    controller.send_signal(signal.SIGINT)
    eventually(lambda: run.status().get("state") == "Suspended", "the stop has begun")
    controller.send_signal(signal.SIGINT)
    code, output = run.finish()
    assert code == 130, output
    run.assert_nothing_runs()


def test_a_closed_output_stops_the_run(new_run: Start) -> None:
    run = new_run(**ONE, training_steps=100_000)
    reader, writer = os.pipe()
    controller = run.start(output=writer)
    os.close(writer)
    run.wait_for_step(2)
    os.close(reader)
    assert controller.wait(PATIENCE) == 130
    assert "cannot be written" in run.said()
    run.assert_nothing_runs()


def test_a_user_s_mistake_ends_the_run_with_its_message(new_run: Start) -> None:
    run = new_run(**ONE, data_sources=[{"uri": "pvc://corpus/en"}])
    run.start()
    code, output = run.finish()
    assert code == 1
    for part in ("spec.data.sources[0].uri", "pvc://corpus/en", "allowed:", "fix:"):
        assert part in output
    assert run.status()["state"] == "Failed"
    assert run.status()["attempt"] == 1, "a restart cannot help"
    assert not run.processes()


def test_a_store_of_another_job_is_refused(new_run: Start) -> None:
    folder = new_run("first", **ONE, training_steps=2)
    volume = folder.folder / "disk"
    volume.mkdir()
    folder.start("--volume", f"checkpoints={volume}")
    folder.succeed()
    other = new_run("second", **ONE, checkpoint_store="pvc://checkpoints/first")
    other.start("--volume", f"checkpoints={volume}")
    code, output = other.finish()
    assert code == 1
    assert "spec.checkpoint.store" in output
    assert "default/first" in output
    assert not other.processes()
    assert (volume / "first" / "step-00000002" / "manifest.json").exists(), "nothing of the first is touched"


def test_fresh_kills_what_an_earlier_run_left(new_run: Start, reference_of_one: Losses) -> None:
    run = new_run(**ONE)
    run.start()
    run.wait_for_step(8)
    old = [*run.agents().values(), *run.ranks().values()]
    run.kill_controller()
    (run.records / "job.json").write_text('{"half')
    run.start()
    code, output = run.finish()
    assert code == 2
    assert "job.json is damaged" in output
    assert "--fresh" in output
    run.start("--fresh")
    run.succeed()
    assert not any(process.is_running() for process in old)
    assert bits(run.steps()) == reference_of_one, "checkpoints stay, and so does what follows from them"
    assert run.status()["attempt"] == 1


def test_an_agent_that_no_record_tells_of_is_ended(new_run: Start, reference_of_one: Losses) -> None:
    """As after a controller that was killed between starting a worker and writing that down."""
    run = new_run(**ONE)
    run.start()
    run.wait_for_step(8)
    run.kill_controller()
    (run.records / "workers" / "job-w0-a1" / "worker.json").unlink()
    unknown = run.agents()[0]
    run.start()
    run.wait_for_step(6, attempt=2)
    assert not unknown.is_running()
    run.succeed()
    assert bits(run.steps()) == reference_of_one


def test_a_controller_that_breaks_leaves_nothing(new_run: Start) -> None:
    run = new_run(**ONE, training_steps=100_000)

    async def broken_off() -> None:
        view = LocalView(on_status=lambda job: None, on_event=lambda event: None, on_note=lambda note: None)
        controller = LocalController(LocalRun(run.manifest, run.state), view)
        running = asyncio.create_task(controller.run())
        await asyncio.to_thread(lambda: eventually(lambda: len(run.ranks()) == 2, "all ranks run"))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(broken_off())
    run.assert_nothing_runs()


def test_a_view_that_fails_does_not_harm_the_run(new_run: Start) -> None:
    run = new_run(**ONE, training_steps=2)

    def fail(_: object) -> None:
        raise ValueError("a mistake in drawing")

    async def watched() -> str | None:
        status = await LocalController(LocalRun(run.manifest, run.state), LocalView(fail, fail, fail)).run()
        return status.state

    assert asyncio.run(watched()) == "Succeeded"


def test_a_second_controller_is_refused(new_run: Start) -> None:
    first = new_run(**ONE, training_steps=100_000)
    controller = first.start()
    eventually(lambda: (first.records / "job.json").exists(), "the first holds the folder")
    second = Run(first.folder, first.manifest)
    second.start()
    code, output = second.finish()
    assert code == 2
    assert "another `llmtrain run --local` controls default.job" in output
    assert controller.poll() is None
    controller.send_signal(signal.SIGTERM)
    first.finish()
    first.assert_nothing_runs()


def test_the_same_store_in_two_state_folders_is_refused(new_run: Start) -> None:
    first, second = new_run(**ONE), new_run(**ONE)
    volume = first.folder / "disk"
    volume.mkdir()
    controller = first.start("--volume", f"checkpoints={volume}")
    eventually(lambda: (first.records / "job.json").exists(), "the first holds the store")
    second.start("--volume", f"checkpoints={volume}")
    code, output = second.finish()
    assert code == 2
    assert "spec.checkpoint.store" in output
    assert "in use by another" in output
    controller.send_signal(signal.SIGTERM)
    first.finish()
