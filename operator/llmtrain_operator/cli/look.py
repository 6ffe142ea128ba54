"""`llmtrain status`: one screen about a job, on a cluster or on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from llmtrain_api.constants import API_VERSION, GROUP, PLURAL, TERMINAL_STATES, VERSION
from llmtrain_api.job import LLMTrainJob
from llmtrain_operator.cli.say import UsageError
from llmtrain_operator.cli.screen import render
from llmtrain_operator.local.records import Records

PERIOD_SECONDS = 2.0
LOSSES_SHOWN = 60


def command(options: argparse.Namespace) -> int:
    """Draw the job once, or with --watch until it has ended; 1 where there is no such job or it failed.

    Raises:
        UsageError: the job cannot be read.
    """
    fetch = _local(options) if options.local else _cluster(options)
    console = Console()
    job = fetch()
    losses: list[float] = _losses(job, [])
    if not options.watch:
        console.print(render(job, losses))
        return 0
    with Live(render(job, losses), console=console, refresh_per_second=2) as live:
        while job.status.state not in TERMINAL_STATES:
            time.sleep(PERIOD_SECONDS)
            job = fetch()
            losses = _losses(job, losses)
            live.update(render(job, losses))
    return 0


def _losses(job: LLMTrainJob, seen: list[float]) -> list[float]:
    if job.status.progress is None:
        return seen
    return [*seen, float(job.status.progress.loss)][-LOSSES_SHOWN:]


def _local(options: argparse.Namespace) -> Callable[[], LLMTrainJob]:
    records = Records(options.state, options.namespace or "default", options.name)

    def fetch() -> LLMTrainJob:
        manifest = records.load_job()
        if manifest is None:
            raise UsageError(
                f"{records.folder} holds no job; start one with `llmtrain run --local FILE`, or give --state"
            )
        return LLMTrainJob.parse(manifest)

    return fetch


def _cluster(options: argparse.Namespace) -> Callable[[], LLMTrainJob]:
    from kubernetes import client, config

    try:
        config.load_kube_config(config_file=options.kubeconfig)
        _, context = config.list_kube_config_contexts(config_file=options.kubeconfig)
    except (config.ConfigException, OSError) as error:
        raise UsageError(f"--kubeconfig: {error}") from error
    namespace = options.namespace or context["context"].get("namespace", "default")
    api = client.CustomObjectsApi()

    def fetch() -> LLMTrainJob:
        try:
            found = api.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, options.name)
            return LLMTrainJob.parse({"apiVersion": API_VERSION, **found})
        except client.ApiException as error:
            raise UsageError(f"{namespace}/{options.name}: {error.status} {error.reason}") from error
        except ValidationError as error:
            raise UsageError(f"{namespace}/{options.name} cannot be read: {error}") from error
        except OSError as error:
            raise UsageError(f"the cluster cannot be reached: {error}") from error

    return fetch
