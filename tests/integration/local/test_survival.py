"""Whatever is killed, every step's loss is that of the run that nobody hurt, to the last bit."""

from __future__ import annotations

import random
import signal
import socket
from functools import partial

import pytest

from tests.integration.local.conftest import Losses, Start
from tests.integration.local.harness import ONE, Run, bits, eventually

pytestmark = pytest.mark.timeout(600)


def test_a_killed_rank_restarts_all_ranks_in_place(new_run: Start, reference: Losses) -> None:
    run = new_run()
    run.start()
    run.wait_for_step(8)
    agents = {index: agent.pid for index, agent in run.agents().items()}
    run.kill_rank(3)
    run.wait_for_step(6, attempt=2)
    assert {index: agent.pid for index, agent in run.agents().items()} == agents
    run.succeed()
    assert bits(run.steps()) == reference
    [failure] = run.status()["failures"]
    assert (failure["class"], failure["action"], failure["rank"]) == ("Crash", "RestartRanks", 3)
    assert float(failure["secondsToNextStep"]) > 0
    run.assert_nothing_runs()


def test_a_killed_worker_is_replaced(new_run: Start, reference: Losses) -> None:
    run = new_run()
    run.start()
    run.wait_for_step(8)
    other = run.agents()[0].pid
    run.agents()[1].kill()
    run.wait_for_step(6, attempt=2)
    assert run.agents()[0].pid == other, "the worker that was not hurt stays"
    run.succeed()
    assert bits(run.steps()) == reference
    assert run.status()["failures"][0]["action"] == "ReplaceWorker"
    assert "job-w1-a2" in [folder.name for folder in (run.records / "workers").iterdir()]
    run.assert_nothing_runs()


def test_a_killed_controller_finds_its_workers_again(new_run: Start, reference: Losses) -> None:
    run = new_run()
    run.start()
    before = run.wait_for_step(4)
    processes = {process.pid for process in [*run.agents().values(), *run.ranks().values()]}
    run.kill_controller()
    eventually(lambda: run.steps()[-1].step >= before.step + 4, "ranks train on without a controller")
    run.start()
    output = run.succeed()
    assert "2 workers of an earlier run are alive" in output
    assert bits(run.steps()) == reference
    assert {step.attempt for step in run.steps()} == {1}
    assert len(run.steps()) == len(reference), "no step was made twice"
    assert len(processes) == 6
    assert not run.status().get("failures")
    run.assert_nothing_runs()


def test_a_controller_that_was_away_for_the_end_takes_note_of_it(new_run: Start, reference_of_one: Losses) -> None:
    run = new_run(**ONE)
    run.start()
    run.wait_for_step(30)
    run.kill_controller()
    eventually(lambda: not run.ranks(), "the ranks have done their work")
    run.start()
    assert "succeeded" in run.succeed()
    assert bits(run.steps()) == reference_of_one
    assert run.status()["attempt"] == 1
    run.start()
    assert "succeeded" in run.succeed(), "once more: it says so and does nothing"
    assert len(run.steps()) == len(reference_of_one)


def test_a_controller_killed_together_with_a_rank(new_run: Start, reference_of_one: Losses) -> None:
    run = new_run(**ONE)
    run.start()
    run.wait_for_step(8)
    run.kill_controller()
    run.kill_rank(0)
    eventually(lambda: not run.ranks(), "the other ranks notice")
    run.start()
    run.succeed()
    assert bits(run.steps()) == reference_of_one
    assert run.status()["attempt"] == 2


def test_workers_that_died_without_a_controller_cost_no_budget(new_run: Start, reference_of_one: Losses) -> None:
    run = new_run(**ONE, failurePolicy_budgets={"crash": 0, "startup": 0})
    run.start()
    run.wait_for_step(8)
    run.kill_controller()
    for agent in run.agents().values():
        agent.kill()
    run.assert_nothing_runs()
    run.start()
    run.succeed()
    assert bits(run.steps()) == reference_of_one
    assert run.status()["failures"][0]["class"] == "Disruption"


def test_kills_at_random_moments(new_run: Start, reference: Losses) -> None:
    dice = random.Random(20)
    run = new_run()
    run.start()
    for number in range(5):
        run.wait_for_step(1 + 5 * number, attempt=1)
        kind = ("rank", "controller", "rank", "agent", "rank")[number]
        eventually(partial(_hurt, run, kind, dice), f"a {kind} to kill")
        if kind == "controller":
            run.start()
    run.succeed()
    assert bits(run.steps()) == reference
    run.assert_nothing_runs()


def _hurt(run: Run, kind: str, dice: random.Random) -> bool:
    if kind == "controller":
        run.kill_controller()
        return True
    victims = list((run.ranks() if kind == "rank" else run.agents()).values())
    if not victims:
        return run.controller is not None and run.controller.poll() is not None
    dice.choice(victims).send_signal(signal.SIGKILL)
    return True


def test_a_port_taken_while_the_controller_was_away(new_run: Start, reference_of_one: Losses) -> None:
    run = new_run(**ONE)
    run.start()
    run.wait_for_step(8)
    run.kill_controller()
    port = int((run.records / "port").read_text())
    with socket.create_server(("127.0.0.1", port)):
        run.start()
        run.succeed()
    assert int((run.records / "port").read_text()) != port
    assert bits(run.steps()) == reference_of_one
    [failure] = run.status()["failures"]
    assert failure["class"] == "Disruption"
    run.assert_nothing_runs()


def test_two_jobs_side_by_side(new_run: Start, reference_of_one: Losses) -> None:
    first, second = new_run("first", **ONE), new_run("second", **ONE)
    for run in (first, second):
        run.start()
    second.wait_for_step(8)
    second.kill_rank(1)
    for run in (first, second):
        run.succeed()
        assert bits(run.steps()) == reference_of_one
    assert first.status()["attempt"] == 1
    assert second.status()["attempt"] == 2


def test_a_status_that_cannot_be_written_for_a_while(new_run: Start, reference_of_one: Losses) -> None:
    run = new_run(**ONE)
    run.start()
    run.wait_for_step(8)
    job, aside = run.records / "job.json", run.records / "aside"
    job.rename(aside)
    (job / "in-the-way").mkdir(parents=True)
    run.kill_rank(1)
    eventually(lambda: "could not be written" in run.said(), "the controller says why nothing goes on")
    assert {step.attempt for step in run.steps()} == {1}, "nothing is started that the status does not tell of"
    (job / "in-the-way").rmdir()
    job.rmdir()
    aside.rename(job)
    run.succeed()
    assert bits(run.steps()) == reference_of_one
