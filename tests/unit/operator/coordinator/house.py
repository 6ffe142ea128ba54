"""A coordinator that listens, and a client of it: what the tests over real HTTP share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from llmtrain_api.sync import Order
from llmtrain_operator.coordinator.hub import Hub
from llmtrain_operator.coordinator.server import CoordinatorServer
from llmtrain_operator.coordinator.token import job_token
from llmtrain_operator.runtime.backend import JobKey

KEY = bytes(range(32))
JOB = JobKey("research", "llama")
UID = "uid-1"
POD = "llama-w0-a1"
WAIT = Order(kind="wait", attempt=1)
RUN = Order(kind="run", attempt=1)


@dataclass
class House:
    """A coordinator that listens, and a client."""

    hub: Hub
    server: CoordinatorServer
    session: aiohttp.ClientSession
    news: list[JobKey] = field(default_factory=list)

    async def sync(
        self, *, pod: str = POD, job: JobKey = JOB, token: str | None = None, **fields: Any
    ) -> tuple[int, Any]:
        body = {"jobUid": UID, "agentId": "a", "sequence": 1, "address": "10.0.0.1", **fields}
        async with self.session.post(self.url(job, pod), json=body, headers=bearer(token)) as response:
            return response.status, await response.json()

    def url(self, job: JobKey = JOB, pod: str = POD) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1/jobs/{job.namespace}/{job.name}/workers/{pod}/sync"


def bearer(token: str | None = None) -> dict[str, str]:
    return {"Authorization": f"Bearer {job_token(KEY, UID) if token is None else token}"}


@contextlib.asynccontextmanager
async def open_house(hold_seconds: float = 30.0) -> AsyncIterator[House]:
    news: list[JobKey] = []
    hub = Hub(news.append, hold_seconds=hold_seconds)
    hub.admit(JOB, UID, [POD])
    server = CoordinatorServer(hub, KEY, "127.0.0.1", 0)
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield House(hub, server, session, news)
    await server.stop()


def run_scenario(scenario: Callable[[House], Awaitable[None]], hold_seconds: float = 30.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), open_house(hold_seconds) as house:
            await scenario(house)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the hub tells nobody
        await asyncio.sleep(0.005)


async def held(house: House, **fields: Any) -> asyncio.Task[tuple[int, Any]]:
    """Start a request that is held, and return once the hub holds it."""
    before = house.hub.connected()
    task = asyncio.ensure_future(house.sync(**fields))
    await until(lambda: house.hub.connected() > before or task.done())
    assert not task.done(), await task
    return task


def rank(state: str = "running", **fields: Any) -> dict[str, Any]:
    return {"localRank": 0, "globalRank": 0, "pid": 7, "state": state, **fields}


def progress(step: int, attempt: int = 1, checkpoint_step: int = -1) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "step": step,
        "firstStep": 1,
        "firstStepAt": 1.0,
        "steps": 100,
        "tokens": step * 10,
        "loss": 1.5,
        "stepAt": 2.0,
        "checkpointStep": checkpoint_step,
    }
