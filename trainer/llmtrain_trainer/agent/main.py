"""`llmtrain-agent`: the first process of a worker."""

from __future__ import annotations

import os
import secrets
import signal
import traceback
from functools import partial

from llmtrain_api.constants import ExitCode
from llmtrain_trainer.agent import linux
from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.settings import Settings, SettingsError
from llmtrain_trainer.agent.spawn import spawn_forkserver


def main() -> None:
    """Run the agent and exit with its code; 64 where the environment or the worker's folder is wrong."""
    # To process 1 the kernel gives no signal that has no handler: keep them pending until there is one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    log = EventLog()
    code = 1
    try:
        code = _start(log)
    except SettingsError as error:
        code = ExitCode.USER_ERROR
        for problem in str(error).splitlines():
            log.error("environment_wrong", problem=problem)
    except BaseException as error:
        log.error("agent_failed", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    # Not sys.exit, for the same threads' sake.
    os._exit(code)


def _start(log: EventLog) -> int:
    settings = Settings.from_environment(os.environ)
    agent_id = secrets.token_hex(8)
    log.bind(job=settings.run_name, worker=settings.pod_name, attempt=0)
    if os.getpid() != 1:
        linux.adopt_orphans()
    spawn = partial(spawn_forkserver, settings.rank_entry, agent_id)
    first = spawn()

    # Only now, while the fork-server imports torch on another core: these take long, too.
    import asyncio

    from llmtrain_trainer.agent.agent import Agent, unhandled
    from llmtrain_trainer.agent.host import RankHost

    host = RankHost(spawn, first, log)

    async def serve() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled(log, context))
        log.info("agent_started", agent=agent_id, pid=os.getpid(), coordinator=settings.coordinator_url)
        return await Agent(settings, agent_id, host, log).run()

    # Not asyncio.run: at its end it waits for the threads of name lookups, which may hang as long as the DNS does.
    code = asyncio.new_event_loop().run_until_complete(serve())
    log.info("agent_ended", exit_code=code)
    return code


if __name__ == "__main__":
    main()
