"""Kubernetes events about jobs: the same message again raises a count instead of filling the API server."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from llmtrain_api.constants import API_VERSION, KIND, MANAGER
from llmtrain_api.job import Metadata
from llmtrain_operator.core.actions import Event
from llmtrain_operator.kube.client import KubeClient
from llmtrain_operator.kube.errors import NotFoundError
from llmtrain_operator.kube.resources import EVENTS

SERIES_SECONDS = 600.0
"""The same message within this time continues a series."""
QUIET_SECONDS = 10.0
"""A series is not written more often than this: a retry loop must not become a write loop."""
REMEMBERED = 4096
NOTE_LIMIT = 1024


@dataclass
class _Series:
    name: str
    count: int
    last_at: float
    written_at: float


class EventRecorder:
    """Posts events by events.k8s.io/v1, in the name of this instance."""

    def __init__(self, client: KubeClient, instance: str, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._instance = instance
        self._clock = clock
        self._series: OrderedDict[tuple[str, ...], _Series] = OrderedDict()

    async def record(self, metadata: Metadata, event: Event) -> None:
        """Post the event, or count it up.

        Raises:
            ApiError: it is lost.
        """
        now = self._clock()
        identity = (metadata.uid, event.type, event.reason, event.message)
        series = self._series.get(identity)
        if series is not None and now - series.last_at < SERIES_SECONDS:
            series.count += 1
            series.last_at = now
            if now - series.written_at >= QUIET_SECONDS and await self._count_up(metadata, series):
                return
            if now - series.written_at < QUIET_SECONDS:
                return
        digest = hashlib.sha256("\0".join((*identity, str(now))).encode()).hexdigest()[:16]
        series = _Series(f"{metadata.name}.{digest}", 1, now, now)
        self._series[identity] = series
        while len(self._series) > REMEMBERED:
            self._series.popitem(last=False)
        await self._client.create(EVENTS, self._body(metadata, event, series))

    async def _count_up(self, metadata: Metadata, series: _Series) -> bool:
        """Return False where the event has expired at the API server."""
        series.written_at = series.last_at
        body = {"series": {"count": series.count, "lastObservedTime": _micro_time(series.last_at)}}
        try:
            await self._client.merge(EVENTS, metadata.namespace, series.name, body)
        except NotFoundError:
            return False
        return True

    def _body(self, metadata: Metadata, event: Event, series: _Series) -> dict[str, Any]:
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": series.name, "namespace": metadata.namespace},
            "eventTime": _micro_time(series.last_at),
            "reportingController": MANAGER,
            "reportingInstance": self._instance,
            "action": event.reason,
            "reason": event.reason,
            "type": event.type,
            "note": event.message[:NOTE_LIMIT],
            "regarding": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": metadata.namespace,
                "name": metadata.name,
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
            },
        }


def _micro_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
