"""Puts the parts of the agent together and runs them in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import traceback
from functools import partial
from typing import Any

from llmtrain_api.sync import Assignment, Order, Progress, SyncRequest
from llmtrain_trainer.agent import linux
from llmtrain_trainer.agent.client import Ends, Superseded, SyncClient
from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.host import RankHost
from llmtrain_trainer.agent.launch import RankStart, rank_starts
from llmtrain_trainer.agent.oom import OomWatch
from llmtrain_trainer.agent.progress import ProgressInbox
from llmtrain_trainer.agent.settings import Settings
from llmtrain_trainer.agent.spawn import AGENT_VARIABLE
from llmtrain_trainer.agent.supervisor import Supervisor, Surroundings
from llmtrain_trainer.agent.watch import POLL_SECONDS, HangWatch, Means
from llmtrain_trainer.agent.workdir import WorkDir

PROGRESS_PERIOD_SECONDS = 5.0
"""Progress alone is told this often, except for an attempt's first step and a new checkpoint."""
LAST_REPORT_SECONDS = 1.0
EXIT_RESERVE_SECONDS = 2.0
"""Of the grace period: for the last report and our own end."""
SUPERSEDED_EXIT_CODE = 1
SYNC_FAILED_EXIT_CODE = 1


class Agent:
    """One start of the agent, from a spawned fork-server to an exit code."""

    def __init__(self, settings: Settings, agent_id: str, host: RankHost, log: EventLog) -> None:
        """Open the worker's folder and the progress socket; needs a running event loop.

        Raises:
            OSError: the folder cannot be written.
        """
        self._settings = settings
        self._agent_id = agent_id
        self._host = host
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._folder = WorkDir(settings.work_dir, agent_id)
        self._inbox = ProgressInbox(self._folder.socket_path(), log, self._progressed)
        self._client = SyncClient(settings, Ends(self._report, self._obey), log)
        surroundings = Surroundings(
            host, log, OomWatch(), self._plan_ranks, self._make_ready, self._sweep, self._client.news
        )
        self._supervisor = Supervisor(surroundings, self._loop)
        self._watch = HangWatch(Means(partial(host.signal, group=False), log, self._client.news))
        self._told_progress: Progress | None = None
        self._told_at = self._loop.time()
        self._progress_timer: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        """Serve the coordinator until it, a signal or its absence ends us; return the exit code."""
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        await self._host.attach(self._supervisor)
        self._reap()  # what ended before the handler was there
        self._inbox.attach(self._loop)
        sync = asyncio.create_task(self._sync())
        orphan = asyncio.create_task(self._leave_when_orphaned())
        watch = asyncio.create_task(self._watch_ranks())
        try:
            code = await self._supervisor.finished
        finally:
            for task in (sync, orphan, watch):
                task.cancel()
            await asyncio.gather(sync, orphan, watch, return_exceptions=True)
        await self._client.last_report(LAST_REPORT_SECONDS)
        await self._client.close()
        self._host.close()
        self._sweep()
        self._inbox.close()
        self._folder.remove()
        return code

    async def _sync(self) -> None:
        try:
            await self._client.run()
        except Superseded as refusal:
            self._log.error("superseded", error=str(refusal))
            self._supervisor.abandon(SUPERSEDED_EXIT_CODE)
        except Exception as error:  # deaf, it would train on unseen and unled; dead, it is replaced
            self._log.error("sync_failed", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
            self._supervisor.abandon(SYNC_FAILED_EXIT_CODE)

    async def _leave_when_orphaned(self) -> None:
        """Leave once nothing runs and nobody has given orders for a while; where no limit is set, never."""
        limit = self._settings.orphan_seconds
        idle_since = self._loop.time()
        while limit:
            now = self._loop.time()
            if not self._supervisor.idle:
                idle_since = now
            left = max(idle_since, self._client.last_answer) + limit - now
            if left <= 0:
                self._log.warning("orphaned", seconds=limit, coordinator=self._settings.coordinator_url)
                self._supervisor.abandon(0)
                return
            await asyncio.sleep(min(left, 1.0))

    async def _watch_ranks(self) -> None:
        while True:
            try:
                self._watch.look(self._supervisor.attempt, self._supervisor.running)
                self._fence_when_cut_off()
            except Exception as error:  # blind for a moment is better than no watch for the rest of the job
                self._log.error("watch_failed", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(POLL_SECONDS)

    def _fence_when_cut_off(self) -> None:
        """Kill ranks that have lost their peers while we have lost the coordinator: the job may go on without us.

        One of the two alone ends nothing: ranks train on without an operator, and of a hang the operator judges.
        """
        limit, silent = self._settings.fence_seconds, self._client.silence_seconds
        if not limit or silent < limit or not self._watch.stuck(self._supervisor.running, limit):
            return
        why = f"cut off: no word from the coordinator for {silent:.0f} s, and no rank of this worker makes a step"
        if self._supervisor.fence(why):
            self._log.error("fenced", seconds=round(silent, 1), coordinator=self._settings.coordinator_url)

    # The two ends of the long-poll

    def _report(self, sequence: int, seen_version: str) -> SyncRequest:
        self._inbox.drain()
        self._told_progress, self._told_at = self._inbox.newest, self._loop.time()
        return SyncRequest(
            job_uid=self._settings.job_uid,
            agent_id=self._agent_id,
            sequence=sequence,
            seen_version=seen_version,
            address=self._settings.pod_address,
            attempt=self._supervisor.attempt,
            warm=self._host.warm,
            stopping=self._supervisor.stopping,
            ranks=self._supervisor.ranks(),
            progress=self._inbox.newest,
            beats=self._watch.beats(self._supervisor.attempt, self._supervisor.running),
        )

    def _obey(self, order: Order) -> bool:
        accepted = self._supervisor.obey(order)
        if accepted:
            self._watch.obey(order)
        return accepted

    def _progressed(self) -> None:
        """Decide whether new progress is news now, or later together with what follows."""
        newest, told = self._inbox.newest, self._told_progress
        if newest is None or newest == told:
            return
        at_once = told is None or told.attempt != newest.attempt or told.checkpoint_step != newest.checkpoint_step
        due = self._told_at + PROGRESS_PERIOD_SECONDS
        if at_once or due <= self._loop.time():
            self._client.news()
        elif self._progress_timer is None:
            self._progress_timer = self._loop.call_at(due, self._progress_due)

    def _progress_due(self) -> None:
        self._progress_timer = None
        self._progressed()

    # What the supervisor needs of the worker

    def _plan_ranks(self, assignment: Assignment) -> list[RankStart]:
        folder = self._folder.attempt_folder(assignment.attempt)
        return rank_starts(self._settings, assignment, folder, self._inbox.path)

    def _make_ready(self, attempt: int) -> None:
        self._sweep()
        self._folder.begin(attempt)
        self._inbox.expect(attempt)

    def _sweep(self) -> None:
        """Kill what ranks left behind in sessions of their own; a user's processes (kubectl exec) are not touched."""
        for pid in linux.children():
            if pid != self._host.pid and linux.started_with(pid, AGENT_VARIABLE, self._agent_id):
                self._log.warning("stray_killed", pid=pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # What the kernel tells

    def _reap(self) -> None:
        """Reap every child that has ended, also those that were never ours."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._host.child_ended(pid, status)

    def _signalled(self, number: signal.Signals) -> None:
        grace = self._settings.grace_seconds
        grace = grace - EXIT_RESERVE_SECONDS if grace > 2 * EXIT_RESERVE_SECONDS else grace / 2
        self._log.info("stopping", signal=signal.Signals(number).name, grace_seconds=grace)
        self._supervisor.stop(grace)


def unhandled(log: EventLog, context: dict[str, Any]) -> None:
    """Write down what an event loop's callback raised: it must neither end the agent nor go unseen."""
    error = context.get("exception")
    log.error("unhandled", message=context.get("message"), error=f"{type(error).__name__}: {error}" if error else "")
