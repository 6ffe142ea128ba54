"""Leader election by a Lease: of several operators one acts.

As in client-go, nobody's clock is compared with another's: a holder is dead when its record has not changed for the
lease's duration by our own clock. Unlike there, an operator that merely cannot reach the API server does not exit: it
stops acting when its time is up, and goes on if the record is still its own when the server is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from llmtrain_operator.kube.client import KubeClient
from llmtrain_operator.kube.errors import ApiError, ConflictError, NotFoundError
from llmtrain_operator.kube.resources import LEASES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseSettings:
    name: str
    namespace: str
    identity: str
    """Name of our pod: a container that restarts in the same pod is the same holder and need not wait."""
    duration_seconds: float = 6.0
    """How long a holder that says nothing is believed to live: the longest wait for its successor."""
    renew_seconds: float = 2.0
    poll_seconds: float = 0.5
    """How often a candidate looks."""


class LeadershipLostError(Exception):
    """Another operator has the lease: this one must not go on."""


class Leader:
    """Holds, or waits for, one Lease."""

    def __init__(self, client: KubeClient, settings: LeaseSettings) -> None:
        self._client = client
        self._settings = settings
        self._held = asyncio.Event()
        self._seen: tuple[str, float] = ("", 0.0)
        """Version of the record, and the loop time when we first saw it."""
        self._mine: dict[str, Any] | None = None
        """The record as we last wrote it: renewing it is then one request."""
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process may act now."""
        return self._held.is_set()

    async def wait(self) -> None:
        """Return when this process may act."""
        await self._held.wait()

    async def run(self) -> None:
        """Acquire the lease and keep it, for ever.

        Raises:
            LeadershipLostError: another operator took it after we had it.
        """
        ever_held = False
        while True:
            holder = await self._try_once()
            if holder == self._settings.identity:
                if not ever_held:
                    logger.info("leader election: this operator leads", extra={"identity": holder})
                ever_held = True
            elif holder is not None and ever_held:
                self._stop_acting()
                raise LeadershipLostError(f"{holder} has taken the lease from {self._settings.identity}")
            await asyncio.sleep(self._settings.renew_seconds if self.is_leader else self._settings.poll_seconds)

    async def release(self) -> None:
        """Give the lease back, so that a successor need not wait. Losing this write costs its wait, no more."""
        if not self.is_leader:
            return
        self._stop_acting()
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(2.0):
                record = await self._client.get(LEASES, self._settings.namespace, self._settings.name)
                if record["spec"].get("holderIdentity") == self._settings.identity:
                    record["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._client.update(LEASES, record)

    async def _try_once(self) -> str | None:
        """Take or renew the lease if it may be; return who holds it now, None where that is not known."""
        asked_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._settings.duration_seconds / 2):
                record = self._mine or await self._record()
                holder = str(record["spec"].get("holderIdentity") or "")
                if holder and holder != self._settings.identity and not self._is_stale(record, asked_at):
                    return holder
                self._mine = await self._client.update(LEASES, self._claimed(record, holder))
        except (ApiError, TimeoutError) as error:
            self._mine = None
            if isinstance(error, ConflictError):
                return None  # somebody wrote it; the next look tells who
            logger.warning("leader election: the lease cannot be renewed: %s", error or "no answer")
            return None
        self._act_until(asked_at + self._settings.duration_seconds)
        return self._settings.identity

    async def _record(self) -> dict[str, Any]:
        try:
            found = await self._client.get(LEASES, self._settings.namespace, self._settings.name)
            return {**found, "spec": found.get("spec") or {}}
        except NotFoundError:
            metadata = {"name": self._settings.name, "namespace": self._settings.namespace}
            empty = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": {}}
            return await self._client.create(LEASES, empty)

    def _is_stale(self, record: dict[str, Any], now: float) -> bool:
        version = str(record["metadata"].get("resourceVersion", ""))
        if version != self._seen[0]:
            self._seen = (version, now)
        believed = float(record["spec"].get("leaseDurationSeconds") or self._settings.duration_seconds)
        return now - self._seen[1] > believed

    def _claimed(self, record: dict[str, Any], holder: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict(record["spec"])
        if holder != self._settings.identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec["holderIdentity"] = self._settings.identity
        spec["leaseDurationSeconds"] = max(1, round(self._settings.duration_seconds))
        spec["renewTime"] = now
        return {**record, "spec": spec}

    def _act_until(self, loop_time: float) -> None:
        loop = asyncio.get_running_loop()
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = loop.call_at(loop_time, self._expired)
        self._held.set()

    def _expired(self) -> None:
        if self.is_leader:
            logger.warning("leader election: the lease was not renewed in time; this operator waits until it is")
        self._stop_acting()

    def _stop_acting(self) -> None:
        self._held.clear()
