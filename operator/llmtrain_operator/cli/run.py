"""`llmtrain run --local`: one job with processes in place of pods."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from rich.console import Console
from rich.live import Live

from llmtrain_api.constants import State
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.cli.manifest import read_one_valid
from llmtrain_operator.cli.say import UsageError
from llmtrain_operator.cli.screen import render
from llmtrain_operator.core.actions import Event
from llmtrain_operator.local.records import LocalStateError
from llmtrain_operator.local.runner import LocalController, LocalRun, LocalView, stop_on_signals

STOPPED_BY_USER = 130


def command(options: argparse.Namespace) -> int:
    """Return 0 where the job succeeded, 1 where it failed, 130 where the user stopped it.

    Raises:
        UsageError: the manifest or an option is wrong, or the state folder cannot be used.
    """
    run = LocalRun(read_one_valid(options.file), options.state, parse_volumes(options.volume), options.fresh)
    try:
        status = asyncio.run(_run(run))
    except LocalStateError as error:
        raise UsageError(str(error)) from error
    if status.state is State.SUCCEEDED:
        return 0
    if status.state is State.FAILED:
        print(f"failed: {status.message}", file=sys.stderr)
        return 1
    print("stopped; the same command goes on from the newest checkpoint", file=sys.stderr)
    return STOPPED_BY_USER


def parse_volumes(texts: list[str]) -> dict[str, str]:
    """Return claim to folder.

    Raises:
        UsageError: one is not CLAIM=FOLDER.
    """
    volumes = {}
    for text in texts:
        claim, separator, folder = text.partition("=")
        if not (separator and claim and folder):
            raise UsageError(f"--volume {text}: must be CLAIM=FOLDER, for instance checkpoints=/data/checkpoints")
        volumes[claim] = folder
    return volumes


async def _run(run: LocalRun) -> LLMTrainJobStatus:
    if sys.stdout.isatty():
        with Live(console=Console(), refresh_per_second=4) as live:
            return await _control(run, _Screen(live))
    return await _control(run, _Lines())


async def _control(run: LocalRun, view: _Screen | _Lines) -> LLMTrainJobStatus:
    controller = LocalController(run, LocalView(view.on_status, view.on_event))
    stop_on_signals(controller)
    return await controller.run()


class _Screen:
    """On a terminal: one screen, drawn anew, with events scrolling above it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._losses: list[float] = []

    def on_status(self, job: LLMTrainJob) -> None:
        if job.status.progress:
            self._losses.append(float(job.status.progress.loss))
        self._live.update(render(job, self._losses[-60:]))

    def on_event(self, event: Event) -> None:
        self._live.console.print(_event_line(event), markup=False, highlight=False)


class _Lines:
    """Into a file or a pipe: one line for each thing that happened."""

    def on_status(self, job: LLMTrainJob) -> None:
        status = job.status
        progress = ""
        if status.progress:
            progress = f" step {status.progress.step}/{status.progress.steps} loss {status.progress.loss}"
        state = status.state.value if status.state else "-"
        workers = status.workers.summary
        print(f"{_clock()} {state} attempt {status.attempt} workers {workers}{progress}", flush=True)

    def on_event(self, event: Event) -> None:
        print(_event_line(event), flush=True)


def _event_line(event: Event) -> str:
    return f"{_clock()} {event.reason}: {event.message}"


def _clock() -> str:
    return time.strftime("%H:%M:%S")
