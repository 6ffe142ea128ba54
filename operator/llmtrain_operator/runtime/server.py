"""What Kubernetes and Prometheus ask of the operator: /healthz, /readyz, /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

BEAT_SECONDS = 1.0
SICK_SECONDS = 10.0
"""An event loop that was stuck this long cannot be trusted to act in time."""


class HealthServer:
    """Serves the probes and the metrics on one address."""

    def __init__(self, host: str, port: int, *, exposition: Callable[[], bytes], unready: Callable[[], str]) -> None:
        """`unready` returns why the operator is not ready; empty where it is. Port 0 takes a free one."""
        self._host = host
        self._port = port
        self._exposition = exposition
        self._unready = unready
        self._beat = 0.0
        self._beating: asyncio.Task[None] | None = None
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be bound.
        """
        self._beating = asyncio.create_task(self._keep_beating(), name="heartbeat")
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host or None, self._port).start()

    async def stop(self) -> None:
        """Close."""
        if self._beating is not None:
            self._beating.cancel()
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port in use, once started."""
        return int(self._runner.addresses[0][1])

    async def _keep_beating(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._beat = loop.time()
            await asyncio.sleep(BEAT_SECONDS)

    async def _healthz(self, _: web.Request) -> web.Response:
        age = asyncio.get_running_loop().time() - self._beat
        healthy = age < SICK_SECONDS
        return web.Response(text=f"heartbeat {age:.1f} s ago\n", status=200 if healthy else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._unready()
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )
