"""`llmtrain status`: one screen about a job, on a cluster or on this machine."""

from __future__ import annotations

import argparse
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from llmtrain_api.constants import API_VERSION, GROUP, PLURAL, TERMINAL_STATES, VERSION, State
from llmtrain_api.job import LLMTrainJob
from llmtrain_operator.cli.say import UsageError, one_line
from llmtrain_operator.cli.screen import LOSSES_SHOWN, render
from llmtrain_operator.local.losses import newest_losses
from llmtrain_operator.local.records import LocalStateError, Records
from llmtrain_operator.local.volumes import store_folder

PERIOD_SECONDS = 2.0
REQUEST_SECONDS = 10.0
DESERTED = "no controller is alive; go on with the same `llmtrain run --local` command"


class Away(Exception):
    """The job cannot be read just now; that may pass."""


@dataclass(frozen=True)
class Sight:
    """A job as it is now, and its newest losses, oldest first (as far as known)."""

    job: LLMTrainJob
    losses: tuple[float, ...]
    deserted: bool = False
    """Nobody controls the job, although it has not ended: nothing will change."""


def command(options: argparse.Namespace) -> int:
    """Draw the job once, or with --watch until it has ended; then 1 where it failed, or where nobody controls it.

    Raises:
        UsageError: the job cannot be read, or there is none.
    """
    fetch = _local(options) if options.local else _cluster(options)
    console = Console()
    try:
        sight = fetch()
    except Away as error:
        raise UsageError(str(error)) from error
    if options.watch:
        return watch(fetch, sight, console)
    console.print(_drawn(sight))
    return 0


def watch(fetch: Callable[[], Sight], sight: Sight, console: Console) -> int:
    """Draw the job again and again until it has ended; return 1 where it failed or nobody controls it.

    What cannot be read is waited for.
    """
    if console.is_terminal:
        with Live(_drawn(sight), console=console, refresh_per_second=2) as live:
            sight = _follow(fetch, sight, live.update)
    else:
        sight = _follow(fetch, sight, _printer(console, sight))
    return 1 if sight.deserted or sight.job.status.state is State.FAILED else 0


def _follow(fetch: Callable[[], Sight], sight: Sight, show: Callable[[RenderableType], None]) -> Sight:
    while sight.job.status.state not in TERMINAL_STATES and not sight.deserted:
        time.sleep(PERIOD_SECONDS)
        try:
            sight = fetch()
            show(_drawn(sight))
        except Away as error:
            show(_stale(sight, error))
    return sight


def _printer(console: Console, first: Sight) -> Callable[[RenderableType], None]:
    """Into a file or a pipe: the first screen, and each that differs from the one before. Live would wait for the end.

    What is compared is the text: a note below the job is a change too.
    """
    before = ""

    def show(screen: RenderableType) -> None:
        nonlocal before
        with console.capture() as captured:
            console.print(screen)
        if captured.get() != before:
            before = captured.get()
            console.print(screen)
            console.file.flush()

    show(_drawn(first))
    return show


def _drawn(sight: Sight) -> RenderableType:
    screen = render(sight.job, sight.losses)
    return Group(screen, Text(DESERTED, style="yellow")) if sight.deserted else screen


def _stale(sight: Sight, error: Away) -> RenderableType:
    note = Text(f"as last seen; {error}; trying again", style="yellow")
    return Group(render(sight.job, sight.losses), note)


def _local(options: argparse.Namespace) -> Callable[[], Sight]:
    try:
        records = Records(options.state, options.namespace or "default", options.name)
    except LocalStateError as error:
        raise UsageError(str(error)) from error

    def fetch() -> Sight:
        # Asked first: what a controller wrote before it left is then in the manifest.
        controlled = _is_controlled(records.folder)
        try:
            manifest = records.load_job()
        except LocalStateError as error:
            raise UsageError(str(error)) from error
        if manifest is None:
            raise UsageError(
                f"{records.folder} holds no job; start one with `llmtrain run --local FILE`, or give --state"
            )
        job = LLMTrainJob.parse(manifest)
        deserted = not controlled and job.status.state not in TERMINAL_STATES
        store = store_folder(job, records.volumes() or {})
        losses = newest_losses(store, LOSSES_SHOWN) if store else ()
        return Sight(job, losses, deserted)

    return fetch


def _is_controlled(folder: Path) -> bool:
    """Return whether a controller holds the lock of a local run; also where that cannot be found out.

    The lock is had for an instant, and shared, so that two that look do not see each other. A controller that starts
    in that very instant is refused, and says what to do; there is no way to ask about a flock without taking it.
    """
    try:
        with open(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _cluster(options: argparse.Namespace) -> Callable[[], Sight]:
    from kubernetes import client
    from urllib3.exceptions import HTTPError

    namespace, api = _connect(options)
    seen: list[float] = []

    def fetch() -> Sight:
        try:
            found = api.get_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, options.name, _request_timeout=REQUEST_SECONDS
            )
            job = LLMTrainJob.parse({"apiVersion": API_VERSION, **found})
        except client.ApiException as error:
            raise _refused(namespace, options.name, error.status, error.reason) from error
        except ValidationError as error:
            raise UsageError(f"{namespace}/{options.name} cannot be read: {one_line(error)}") from error
        except (HTTPError, OSError) as error:
            raise Away(f"the cluster cannot be reached: {one_line(error)}") from error
        if job.status.progress:
            seen[:] = [*seen, float(job.status.progress.loss)][-LOSSES_SHOWN:]
        return Sight(job, tuple(seen) if options.watch else ())

    return fetch


def _connect(options: argparse.Namespace) -> tuple[str, Any]:
    """Return the namespace to look in, and the API of the cluster.

    Raises:
        UsageError: there is no kubeconfig, or it cannot be used.
    """
    from kubernetes import client, config
    from yaml import YAMLError

    fix = "give the file of a cluster that runs llmtrain, or --local"
    try:
        config.load_kube_config(config_file=options.kubeconfig)
        _, context = config.list_kube_config_contexts(config_file=options.kubeconfig)
        namespace = options.namespace or context["context"].get("namespace", "default")
        return str(namespace), client.CustomObjectsApi()
    except (config.ConfigException, OSError) as error:
        raise UsageError(f"--kubeconfig: {one_line(error)}; {fix}") from error
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        # The library takes the shape of the file for granted.
        file = options.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise UsageError(f"--kubeconfig: {file} is no kubeconfig ({one_line(error)}); {fix}") from error


def _refused(namespace: str, name: str, status: int, reason: str) -> Exception:
    if status in (429,) or status >= 500:
        return Away(f"the API server answers {status} {reason}")
    fix = "kubectl get llmtrainjobs -A lists all jobs" if status == 404 else "ask for the right to get llmtrainjobs"
    return UsageError(f"{namespace}/{name}: {status} {reason}; {fix}")
