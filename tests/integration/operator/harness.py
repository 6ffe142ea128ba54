"""The operator as a process, a fake API server it talks to, and agents that speak the real protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from llmtrain_operator.coordinator.token import job_token
from llmtrain_operator.kube.resources import JOBS, PODS
from tests.support.apiserver import FakeApiServer, fake_api_server
from tests.support.jobs import JobBuilder
from tests.support.ports import free_port

KEY = bytes(range(32))
PATIENCE_SECONDS = 120.0
NAMESPACE = "lab"
Object = dict[str, Any]


def manifest(name: str = "demo", **spec: Any) -> Object:
    """An LLMTrainJob of two workers, as a user applies it."""
    job = JobBuilder(name, NAMESPACE).with_spec(**spec).build().to_wire()
    return {**job, "metadata": {"name": name, "namespace": NAMESPACE}, "status": {}}


@dataclass
class OperatorProcess:
    """One life of `llmtrain-operator`."""

    server: FakeApiServer
    folder: Path
    coordinator_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    async def start(self, *flags: str, identity: str = "operator-0", key: bytes = KEY) -> None:
        """Start it; kill -9 and start again as often as needed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "key").write_bytes(key)
        (self.folder / "kubeconfig").write_text(_kubeconfig(self.server.url))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "llmtrain_operator.runtime.main",
            f"--coordinator-url=http://127.0.0.1:{self.coordinator_port}",
            f"--coordinator-port={self.coordinator_port}",
            f"--metrics-port={self.metrics_port}",
            f"--key-file={self.folder / 'key'}",
            f"--identity={identity}",
            "--log-format=text",
            *flags,
            env={**os.environ, "KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(self.folder)},
            stderr=(self.folder / "log").open("ab"),
        )

    async def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and return the exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), PATIENCE_SECONDS)

    async def ask(self, path: str) -> tuple[int, str]:
        """Return status and text of /metrics, /healthz or /readyz; status 0 where nobody listens."""
        try:
            url = f"http://127.0.0.1:{self.metrics_port}{path}"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    def log(self) -> str:
        return (self.folder / "log").read_text() if (self.folder / "log").exists() else ""


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, *flags: str, start: bool = True
) -> AsyncIterator[tuple[FakeApiServer, OperatorProcess]]:
    """A server and an operator that runs; both end with the block, and a failure shows the operator's log."""
    async with fake_api_server() as server:
        operator = OperatorProcess(server, folder)
        if start:
            await operator.start(*flags)
        try:
            yield server, operator
        except BaseException:
            print(operator.log(), file=sys.stderr)
            raise
        finally:
            if operator.process is not None:
                await operator.kill()


async def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until the condition holds and return its value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what}"
        await asyncio.sleep(0.02)


async def answers(operator: OperatorProcess, path: str, code: int) -> None:
    """Wait until a probe answers with that status code."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (await operator.ask(path))[0] != code:
        assert time.monotonic() < deadline, f"{path} never answered {code}"
        await asyncio.sleep(0.05)


def status_of(server: FakeApiServer, name: str = "demo") -> Object:
    job = server.get(JOBS, NAMESPACE, name)
    return {} if job is None else job.get("status") or {}


def live_pods(server: FakeApiServer, name: str = "demo") -> list[Object]:
    """Pods of the job that are neither ended nor being deleted, by worker index."""
    pods = [
        pod
        for pod in server.objects(PODS)
        if pod["metadata"]["name"].startswith(f"{name}-w")
        and not pod["metadata"].get("deletionTimestamp")
        and pod["status"].get("phase") not in ("Failed", "Succeeded")
    ]
    return sorted(pods, key=lambda pod: int(pod["metadata"]["labels"]["llmtrain.dev/worker"]))


async def run_pod(server: FakeApiServer, pod: Object) -> None:
    """Do what scheduler and kubelet do."""
    name = pod["metadata"]["name"]

    def start(obj: Object) -> None:
        obj["spec"]["nodeName"] = "node-1"
        running = {"name": "trainer", "state": {"running": {}}}
        obj["status"] = {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [running]}

    await server.change(PODS, NAMESPACE, name, start)


class ScriptedAgent:
    """Speaks the sync protocol for one pod; its ranks do what the test says."""

    def __init__(self, operator: OperatorProcess, pod: Object, agent_id: str = "agent") -> None:
        labels = pod["metadata"]["labels"]
        self.pod = pod["metadata"]["name"]
        self.report: Object = {"attempt": 0, "warm": True, "ranks": []}
        self.order: Object | None = None
        self._uid = labels["llmtrain.dev/job-uid"]
        self._url = (
            f"http://127.0.0.1:{operator.coordinator_port}/v1/jobs/{NAMESPACE}/{labels['llmtrain.dev/job']}"
            f"/workers/{self.pod}/sync"
        )
        self._agent_id = f"{agent_id}-{self.pod}"
        self._sequence = 0
        self._version = ""
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def say(self, **fields: Any) -> None:
        """Change the report and send it now."""
        self.report.update(fields)
        self._news.set()

    async def started(self, attempt: int) -> None:
        """Wait for the order to run that attempt, and report the rank as running."""
        await until(lambda: self._ordered("run", attempt), f"{self.pod} is told to run attempt {attempt}")
        assert self.order is not None
        rank = self.order["assignment"]["nodeRank"]
        self.say(
            attempt=attempt, ranks=[{"localRank": 0, "globalRank": rank, "pid": 100 + attempt, "state": "running"}]
        )

    def ended(self, **how: Any) -> None:
        """The rank ends: exit_code or signal."""
        rank = {**self.report["ranks"][0], "state": "exited", "exitedAt": time.time(), **how}
        self.say(ranks=[rank])

    def stepped(self, step: int, checkpoint_step: int = -1) -> None:
        now = time.time()
        progress = {"attempt": self.report["attempt"], "step": step, "firstStep": 1, "firstStepAt": now, "steps": 100}
        self.say(progress={**progress, "tokens": step, "loss": 1.0, "stepAt": now, "checkpointStep": checkpoint_step})

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _ordered(self, kind: str, attempt: int) -> bool:
        return self.order is not None and (self.order["kind"], self.order.get("attempt")) == (kind, attempt)

    async def _run(self) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {job_token(KEY, self._uid)}"}) as session:
            while True:
                self._news.clear()
                exchange = asyncio.create_task(self._exchange(session))
                news = asyncio.create_task(self._news.wait())
                try:
                    await asyncio.wait({exchange, news}, return_when=asyncio.FIRST_COMPLETED)
                    if exchange.done() and not exchange.result():
                        await asyncio.sleep(0.1)
                finally:
                    exchange.cancel()
                    news.cancel()
                    await asyncio.gather(exchange, news, return_exceptions=True)

    async def _exchange(self, session: aiohttp.ClientSession) -> bool:
        self._sequence += 1
        identity = {"jobUid": self._uid, "agentId": self._agent_id, "address": "127.0.0.1"}
        body = {**identity, **self.report, "sequence": self._sequence, "seenVersion": self._version}
        try:
            async with session.post(self._url, json=body) as response:
                if response.status != 200:
                    return False
                answer = await response.json()
        except aiohttp.ClientError:
            return False
        self._version, self.order = answer["version"], answer["order"]
        return True


async def training(server: FakeApiServer, operator: OperatorProcess) -> list[ScriptedAgent]:
    """Bring a job to its first step; return its agents."""
    await server.put(JOBS, manifest())
    pods = await until(lambda: len(live_pods(server)) == 2 and live_pods(server), "two pods")
    for pod in pods:
        await run_pod(server, pod)
    agents = [ScriptedAgent(operator, pod) for pod in pods]
    for agent in agents:
        await agent.started(1)
    agents[0].stepped(1)
    await until(lambda: status_of(server)["state"] == "Training", "training")
    return agents


def _kubeconfig(url: str) -> str:
    return f"""
apiVersion: v1
kind: Config
current-context: fake
clusters: [{{name: fake, cluster: {{server: "{url}"}}}}]
contexts: [{{name: fake, context: {{cluster: fake, user: fake}}}}]
users: [{{name: fake, user: {{token: secret}}}}]
"""
