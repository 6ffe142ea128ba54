"""The whole operator process, with real kopf, against an API server: from a job to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from llmtrain_operator.kube.resources import JOBS, SECRETS
from tests.integration.operator.harness import (
    NAMESPACE,
    ScriptedAgent,
    cluster,
    live_pods,
    manifest,
    run_pod,
    status_of,
    until,
)


def test_a_job_gets_its_status_first_then_its_pods_and_ends_when_its_ranks_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as (server, operator):
            await server.put(JOBS, manifest())
            pods = await until(lambda: len(live_pods(server)) == 2 and live_pods(server), "two pods")
            first = server.writes()[0]
            assert (first.verb, first.resource) == ("patch", "llmtrainjobs/status")
            assert server.get(SECRETS, NAMESPACE, "demo-agent-token") is not None
            for pod in pods:
                await run_pod(server, pod)
            agents = [ScriptedAgent(operator, pod) for pod in pods]
            for agent in agents:
                await agent.started(1)
            agents[0].stepped(1)
            await until(lambda: status_of(server)["state"] == "Training", "training")
            for agent in agents:
                agent.ended(exitCode=0)
            await until(lambda: status_of(server)["state"] == "Succeeded", "success")
            for agent in agents:
                await until(lambda agent=agent: agent.order["kind"] == "exit", "told to leave")
                await agent.stop()

    asyncio.run(main())
