"""A scripted coordinator over real HTTP, and a real agent process, for the agent's tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from llmtrain_api.constants import Env
from llmtrain_api.sync import SYNC_PATH, Assignment, Order, SyncRequest, SyncResponse

REPOSITORY = Path(__file__).parents[3]
PROGRAM = "tests.integration.agent.rank_program:run"
TOKEN = "first-token"
PATIENCE = 90.0
"""Seconds until a condition that does not come true fails the test: generous, for a loaded machine."""


async def eventually(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)
    return value


def run_order(attempt: int, spec: dict[str, Any] | None = None, ranks: int = 2, **changes: Any) -> Order:
    """Return the order to run an attempt of one worker."""
    assignment = Assignment(
        attempt=attempt,
        node_rank=changes.pop("node_rank", 0),
        num_nodes=changes.pop("num_nodes", 1),
        ranks_per_worker=ranks,
        master_address="127.0.0.1",
        master_port=changes.pop("master_port", 29500 + attempt),
        run_id="team/job",
        spec=spec or {},
    )
    return Order(kind="run", attempt=attempt, assignment=assignment, **changes)


@dataclass(frozen=True)
class Received:
    report: SyncRequest
    at: float
    """Unix seconds."""
    token: str


@dataclass
class Coordinator:
    """Answers with `order`, or with `refusal`; keeps every report in `received`."""

    order: Order = field(default_factory=lambda: Order(kind="wait"))
    version: int = 1
    refusal: Callable[[], web.Response] | None = None
    received: list[Received] = field(default_factory=list)
    port: int = 0
    hold_seconds: float = 25.0
    _runner: web.AppRunner | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def start(self) -> None:
        application = web.Application()
        application.router.add_post(SYNC_PATH, self._sync)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        assert self._runner
        await self._runner.cleanup()

    async def give(self, order: Order) -> None:
        """Make this the desired state and answer held requests."""
        async with self._changed:
            self.order, self.version = order, self.version + 1
            self._changed.notify_all()

    async def until(
        self, condition: Callable[[SyncRequest], Any], what: str, after: int = 0, seconds: float = PATIENCE
    ) -> Received:
        """Return the first report (from index `after` on) that fulfils the condition."""
        index = after

        def look() -> Received | None:
            nonlocal index
            while index < len(self.received):
                index += 1
                if condition(self.received[index - 1].report):
                    return self.received[index - 1]
            return None

        found: Received = await eventually(look, what, seconds)
        return found

    async def _sync(self, request: web.Request) -> web.Response:
        at = time.time()
        report = SyncRequest.model_validate_json(await request.read())
        self.received.append(Received(report, at, request.headers.get("Authorization", "")))
        if self.refusal:
            return self.refusal()
        async with self._changed:
            try:
                async with asyncio.timeout(self.hold_seconds):
                    await self._changed.wait_for(lambda: str(self.version) != report.seen_version)
            except TimeoutError:
                pass
        answer = SyncResponse(version=str(self.version), order=self.order, hold_seconds=self.hold_seconds)
        return web.json_response(answer.to_wire())


class AgentProcess:
    """A real agent; everything it writes is in `output`."""

    def __init__(self, folder: Path, port: int, environment: dict[str, str], prefix: Sequence[str] = ()) -> None:
        self.folder = folder
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN + "\n")
        self.output = folder / "agent.log"
        own = {
            Env.COORDINATOR_URL: f"http://127.0.0.1:{port}/",
            Env.TOKEN_FILE: str(self.token_file),
            Env.JOB_NAMESPACE: "team",
            Env.JOB_NAME: "job",
            Env.JOB_UID: "uid-1",
            Env.POD_NAME: "job-w0-a1",
            Env.POD_ADDRESS: "127.0.0.1",
            Env.WORKER_INDEX: "0",
            Env.GRACE_SECONDS: "30",
            Env.WORK_DIR: str(folder / "work"),
            "LLMTRAIN_RANK_ENTRY": PROGRAM,
            "PYTHONPATH": str(REPOSITORY),
        }
        command = [*prefix, sys.executable, "-m", "llmtrain_trainer.agent.main"]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> list[dict[str, Any]]:
        """Return the agent's own events so far."""
        lines = self.output.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"time"')]

    def event(self, name: str) -> dict[str, Any] | None:
        return next((line for line in self.log() if line["event"] == name), None)

    async def exit_code(self) -> int:
        """Wait for the agent's end."""
        await eventually(lambda: self.process.poll() is not None, f"the agent ends; {self.output.read_text()[-3000:]}")
        code: int = self.process.returncode
        return code

    def descendants(self) -> dict[int, str]:
        """Return the names of all living processes below the agent (zombies count)."""
        return descendants(self.pid)

    def end(self) -> None:
        """Leave nothing behind, whatever the test did."""
        family = [self.pid, *self.descendants()] if self.process.poll() is None else []
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(timeout=PATIENCE)


def descendants(root: int) -> dict[int, str]:
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            parents[int(entry.name)] = (int(stat.rpartition(")")[2].split()[1]), name)
    found = {root: ""}
    grown = True
    while grown:
        new = {pid: name for pid, (parent, name) in parents.items() if parent in found and pid not in found}
        found |= new
        grown = bool(new)
    del found[root]
    return found


def named(processes: dict[int, str], name: str) -> list[int]:
    """Return the process ids with this name (or beginning)."""
    return [pid for pid, own in processes.items() if own.startswith(name)]


def alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Stage:
    """What a test acts on."""

    coordinator: Coordinator
    folder: Path
    agents: list[AgentProcess] = field(default_factory=list)

    def agent(self, prefix: Sequence[str] = (), **environment: str) -> AgentProcess:
        self.agents.append(AgentProcess(self.folder, self.coordinator.port, environment, prefix))
        return self.agents[-1]

    async def running(self, spec: dict[str, Any] | None = None, ranks: int = 2, **environment: str) -> AgentProcess:
        """Start an agent and attempt 1 on it, and wait until its ranks are reported and can handle signals."""
        agent = self.agent(**environment)
        await self.coordinator.give(run_order(1, spec, ranks))
        await self.coordinator.until(lambda report: is_running(report, 1), "attempt 1 runs")
        await eventually(lambda: len(list(self.folder.glob("work/*/attempt-1/*.up"))) == ranks, "all ranks are up")
        return agent


def has_ended(report: SyncRequest, attempt: int) -> bool:
    return report.attempt == attempt and bool(report.ranks) and all(rank.state == "exited" for rank in report.ranks)


def is_running(report: SyncRequest, attempt: int) -> bool:
    return report.attempt == attempt and bool(report.ranks) and all(rank.state == "running" for rank in report.ranks)


def on_stage(test: Callable[[Stage], Awaitable[None]]) -> Callable[[Path], None]:
    """Run an async test with a coordinator; afterwards every agent and its processes are gone."""

    async def play(folder: Path) -> None:
        stage = Stage(Coordinator(), folder)
        await stage.coordinator.start()
        try:
            await test(stage)
        finally:
            for agent in stage.agents:
                agent.end()
            await stage.coordinator.stop()

    def run(tmp_path: Path) -> None:
        asyncio.run(play(tmp_path))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
