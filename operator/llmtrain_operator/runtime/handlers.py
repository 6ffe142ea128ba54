"""What is registered with kopf: plain watches. kopf writes nothing: no finalizers, no annotations, no events.

Only `on.event` is used. kopf's other handlers (create, update, daemon, timer) keep their state on users' objects and
react to differences; we are told that something happened, and look at everything there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf
from kubernetes import client as official

from llmtrain_api.constants import GROUP, PLURAL, VERSION
from llmtrain_operator.kube.backend import POD_SELECTOR
from llmtrain_operator.kube.resources import JOBS, NODES, PODS, Resource

CREDENTIALS_MINUTES = 50
"""Service account tokens live an hour by default; kopf alone would ask for a new one only after a refusal."""

Feed = Callable[[Resource, str | None, dict[str, Any]], None]


class EndlessBackoff:
    """Delays between tries of a watch: it must outlive any outage of the API server, and come back soon after it."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.1, 0.2, 0.5, 1.0)
        while True:
            yield 2.0


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None  # it would kill the process that hosts it
    settings.watching.label_selectors["v1", "pods"] = POD_SELECTOR
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 5
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = EndlessBackoff()
    settings.queueing.error_delays = (0.5, 1, 2)
    settings.queueing.worker_limit = 200
    settings.queueing.exit_timeout = 0.5
    settings.execution.max_workers = 1
    return settings


def kopf_registry(configuration: official.Configuration, feed: Feed, with_nodes: bool) -> kopf.OperatorRegistry:
    """Return the handlers; `feed` is called in kopf's thread. Nodes are watched only where that may be done."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return connection_info(configuration)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_event(event: kopf.RawEvent, **_: Any) -> None:
        feed(JOBS, event["type"], dict(event["object"]))

    @kopf.on.event("v1", "pods", registry=registry)
    async def pod_event(event: kopf.RawEvent, **_: Any) -> None:
        feed(PODS, event["type"], dict(event["object"]))

    if with_nodes:

        @kopf.on.event("v1", "nodes", registry=registry)
        async def node_event(event: kopf.RawEvent, **_: Any) -> None:
            feed(NODES, event["type"], dict(event["object"]))

    return registry


def connection_info(configuration: official.Configuration) -> kopf.ConnectionInfo:
    """Return the official client's connection settings in kopf's form, with the token as it is now."""
    scheme, _, token = (configuration.get_api_key_with_prefix("authorization") or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        scheme=scheme or None,
        token=token or None,
        expiration=datetime.now(UTC) + timedelta(minutes=CREDENTIALS_MINUTES),
    )
