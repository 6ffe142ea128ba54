"""`llmtrain-operator`: the process on a cluster.

It starts in an order in which nothing is decided from half a picture: probes answer, caches are full, the lease is
ours, agents can reach us, and only then jobs are looked at.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

from kubernetes import client as official
from kubernetes.config import ConfigException

from llmtrain_api.job import LLMTrainJob
from llmtrain_api.validation import rule_problems
from llmtrain_operator.coordinator.server import CoordinatorServer
from llmtrain_operator.core.plan import plan
from llmtrain_operator.core.worker_pod import PodSettings
from llmtrain_operator.kube.backend import KubeBackend, KubeOptions
from llmtrain_operator.kube.client import KubeClient, load_configuration
from llmtrain_operator.kube.lease import Leader, LeadershipLostError, LeaseSettings
from llmtrain_operator.runtime.controller import Controller
from llmtrain_operator.runtime.informer import Informer
from llmtrain_operator.runtime.job_metrics import JobGauges
from llmtrain_operator.runtime.logs import set_up_logs
from llmtrain_operator.runtime.metrics import Metrics, Sources
from llmtrain_operator.runtime.reconciler import Decisions
from llmtrain_operator.runtime.server import HealthServer
from llmtrain_operator.runtime.settings import OperatorSettings, SettingsError, parse_settings

logger = logging.getLogger(__name__)

FINISH_SECONDS = 3.0
"""Time for looks under way to end when the operator is told to leave."""
EXIT_USAGE = 64
EXIT_LEADERSHIP_LOST = 1


class Operator:
    """All parts of one operator process."""

    def __init__(self, settings: OperatorSettings, configuration: official.Configuration) -> None:
        key = settings.key()
        self._settings = settings
        self._metrics = Metrics(JobGauges(each_job=settings.job_metrics))
        self._client = KubeClient(configuration, self._metrics.api_request)
        # A client of its own: a renewal must not wait for a free connection behind a thousand pods being created.
        self._lease_client = KubeClient(configuration, self._metrics.api_request)
        self._leader = Leader(self._lease_client, _lease_settings(settings))
        pods = PodSettings(settings.coordinator_url, settings.image_pull_policy)
        options = KubeOptions(key, pods, settings.identity, settings.namespaces)
        self._backend = KubeBackend(self._client, options, lambda job: self._controller.queue.add(job))
        decisions = Decisions(plan, spec_errors, settings.policy)
        self._controller = Controller(
            self._backend,
            decisions,
            self._metrics,
            may_act=self._leader.wait,
            resync_seconds=settings.resync_seconds,
        )
        self._coordinator = CoordinatorServer(
            self._controller.hub,
            key,
            settings.coordinator_host,
            settings.coordinator_port,
            on_wrong_token=self._backend.renew_secret,
            on_refused=self._metrics.sync_refused,
        )
        self._informer = Informer(
            configuration,
            self._backend.feed,
            self._backend.resync,
            namespaces=settings.namespaces,
            resync_seconds=settings.resync_seconds,
            on_repaired=self._metrics.repaired,
        )
        self._health = HealthServer(
            settings.metrics_host,
            settings.metrics_port,
            exposition=self._metrics.exposition,
            unready=self._unready,
        )
        self._working: asyncio.Future[None] | None = None
        self._metrics.watch(self._sources())

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set.

        Raises:
            LeadershipLostError: another operator leads now.
            OSError: a port is taken.
        """
        await self._health.start()
        background = [
            asyncio.create_task(self._informer.run(), name="informer"),
            asyncio.create_task(self._leader.run(), name="leader"),
            asyncio.create_task(self._lead(), name="lead"),
        ]
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait([*background, stopped], return_when=asyncio.FIRST_COMPLETED)
            await self._finish()
            for ended in background:
                if ended.done():
                    ended.result()
        finally:
            tasks: list[asyncio.Task[Any]] = [*background, stopped]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leader.release()
            await self._health.stop()
            self._client.close()
            self._lease_client.close()

    def _sources(self) -> Sources:
        queue, hub = self._controller.queue, self._controller.hub
        return Sources(
            queue_depth=lambda: queue.depth,
            queue_oldest_seconds=lambda: queue.oldest_seconds,
            agents=hub.connected,
            silences=hub.silences,
            leader=lambda: self._leader.is_leader,
            watching=lambda: self._informer.is_watching,
            watch_age_seconds=lambda: self._informer.age_seconds,
        )

    async def _lead(self) -> None:
        await self._informer.synced.wait()
        await self._leader.wait()
        self._controller.reconciler.admit_all()
        await self._coordinator.start()
        logger.info("the coordinator listens on port %d", self._coordinator.port)
        self._working = asyncio.ensure_future(self._controller.run(self._settings.workers))
        await self._working

    async def _finish(self) -> None:
        """Start nothing new, send the agents away to the next operator, and let looks under way end."""
        self._controller.stop()
        await self._coordinator.stop()
        if self._working is not None:
            await asyncio.wait([self._working], timeout=FINISH_SECONDS)

    def _unready(self) -> str:
        if not self._informer.synced.is_set():
            return "jobs and pods are not listed yet"
        return "" if self._informer.is_watching else "the watches are being started anew"


def spec_errors(job: LLMTrainJob) -> list[str]:
    """Return the rules of the contract that a parsed job breaks."""
    return [str(problem) for problem in rule_problems(job.to_wire())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; return the exit code."""
    try:
        settings = parse_settings(sys.argv[1:] if arguments is None else arguments)
        set_up_logs(settings.log_format, settings.log_level)
        configuration = load_configuration()
        return asyncio.run(_run(settings, configuration))
    except (SettingsError, ConfigException) as error:
        print(f"llmtrain-operator: {error}", file=sys.stderr)
        return EXIT_USAGE


async def _run(settings: OperatorSettings, configuration: official.Configuration) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await Operator(settings, configuration).run(stop)
    except LeadershipLostError as error:
        logger.error("%s; leaving, so that two never act", error)
        return EXIT_LEADERSHIP_LOST
    except OSError as error:
        logger.error("an address cannot be listened on: %s", error)
        return EXIT_USAGE
    logger.info("stopped")
    return 0


def _lease_settings(settings: OperatorSettings) -> LeaseSettings:
    duration = settings.lease_duration_seconds
    return LeaseSettings(
        name=settings.lease_name,
        namespace=settings.lease_namespace,
        identity=settings.identity,
        duration_seconds=duration,
        renew_seconds=duration / 3,
    )


if __name__ == "__main__":
    sys.exit(main())
