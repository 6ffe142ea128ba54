"""`llmtrain run --local`: one job with processes in place of pods."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from llmtrain_api.constants import MANAGER, State
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_operator.cli.manifest import read_one_valid
from llmtrain_operator.cli.say import UsageError
from llmtrain_operator.cli.screen import LOSSES_SHOWN, render
from llmtrain_operator.core.actions import Event
from llmtrain_operator.local.prepare import LocalRun
from llmtrain_operator.local.records import LocalStateError
from llmtrain_operator.local.runner import LocalController, LocalView, stop_on_signals

STOPPED_BY_USER = 130
NEEDED_MODULES = ("llmtrain_trainer", "torch")


def command(options: argparse.Namespace) -> int:
    """Return 0 where the job succeeded, 1 where it failed, 130 where the user stopped it.

    Raises:
        UsageError: the manifest or an option is wrong, the state folder cannot be used, or the trainer is not there.
    """
    manifest = read_one_valid(options.file)
    refuse_what_would_not_run(LLMTrainJob.parse(manifest))
    run = LocalRun(manifest, options.state, parse_volumes(options.volume), options.fresh)
    try:
        status = asyncio.run(_run(run))
    except LocalStateError as error:
        raise UsageError(str(error)) from error
    return _conclude(manifest["metadata"]["name"], status)


def parse_volumes(texts: Sequence[str]) -> dict[str, str]:
    """Return claim to folder.

    Raises:
        UsageError: one is not CLAIM=FOLDER, or a claim is given twice.
    """
    volumes: dict[str, str] = {}
    for text in texts:
        claim, separator, folder = text.partition("=")
        if not (separator and claim and folder):
            raise UsageError(f"--volume {text}: must be CLAIM=FOLDER, for instance checkpoints=/data/checkpoints")
        if claim in volumes:
            raise UsageError(f"--volume {text}: the claim has a folder already, {volumes[claim]}; give it once")
        volumes[claim] = folder
    return volumes


def refuse_what_would_not_run(job: LLMTrainJob) -> None:
    """Refuse what a cluster accepts and leaves lying: here somebody waits.

    Raises:
        UsageError: the job would never start.
    """
    if job.spec.suspend:
        raise UsageError("spec.suspend is true: the job would wait for ever; set it to false, or leave it out")
    if job.spec.managed_by != MANAGER:
        raise UsageError(
            f"spec.managedBy is {job.spec.managed_by!r}: the job is another program's; allowed here: {MANAGER!r}; "
            "leave it out"
        )
    for module in NEEDED_MODULES:
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"{module} is not installed: pip install 'llmtrain[operator,trainer]'")


def _conclude(name: str, status: LLMTrainJobStatus) -> int:
    if status.state is State.SUCCEEDED:
        print(f"{name} succeeded: {status.message}", flush=True)
        return 0
    if status.state is State.FAILED:
        print(f"{name} failed: {status.message}\n(--fresh starts it anew; checkpoints stay)", file=sys.stderr)
        return 1
    print(f"{name}: {status.message}", file=sys.stderr)
    return STOPPED_BY_USER


async def _run(run: LocalRun) -> LLMTrainJobStatus:
    if sys.stdout.isatty():
        with Live(console=Console(), refresh_per_second=4) as live:
            return await _control(run, _Screen(live))
    return await _control(run, _Lines())


async def _control(run: LocalRun, view: _Screen | _Lines) -> LLMTrainJobStatus:
    controller = LocalController(run, LocalView(view.on_status, view.on_event, view.on_note))
    stop_on_signals(controller)
    return await controller.run()


class _Screen:
    """On a terminal: one screen, drawn anew, with events scrolling above it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._losses: list[float] = []

    def on_status(self, job: LLMTrainJob) -> None:
        if job.status.progress:
            self._losses = [*self._losses, float(job.status.progress.loss)][-LOSSES_SHOWN:]
        self._live.update(render(job, self._losses))

    def on_event(self, event: Event) -> None:
        self.on_note(f"{event.reason}: {event.message}")

    def on_note(self, note: str) -> None:
        self._live.console.print(_stamped(note), markup=False, highlight=False)


class _Lines:
    """Into a file or a pipe: one line for each thing that happened."""

    def on_status(self, job: LLMTrainJob) -> None:
        status = job.status
        progress = ""
        if status.progress:
            progress = f" step {status.progress.step}/{status.progress.steps} loss {status.progress.loss}"
        state = status.state.value if status.state else "-"
        self.on_note(f"{state} attempt {status.attempt} workers {status.workers.summary}{progress}")

    def on_event(self, event: Event) -> None:
        self.on_note(f"{event.reason}: {event.message}")

    def on_note(self, note: str) -> None:
        print(_stamped(note), flush=True)


def _stamped(line: str) -> str:
    return f"{time.strftime('%H:%M:%S')} {line}"
