"""What the agents last said and what they shall do: the meeting point of their long-polls and the reconciler.

Everything here is in memory and rebuilt from the agents' next requests after a restart; nothing here is durable.
All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from llmtrain_api.sync import HOLD_SECONDS, Order, Progress, SyncRequest, SyncResponse
from llmtrain_operator.core.observed import AgentView
from llmtrain_operator.runtime.backend import JobKey

RECONNECT_SECONDS = 10.0
"""An agent that was silent this long and comes back is news."""
NO_ORDER_HOLD_SECONDS = HOLD_SECONDS
"""How long a known worker without an order waits for one before it is told to ask again."""
REMEMBERED_AGENTS = 8
"""Superseded agents remembered for each worker; more restarts of one container than that are not told apart."""


class SyncRefusedError(Exception):
    """A request that gets no order. `status` is the HTTP status."""

    def __init__(self, status: int, error: str, fix: str = "") -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.fix = fix


@dataclass(frozen=True)
class _Published:
    version: str
    order: Order


@dataclass
class _Agent:
    view: AgentView
    sequence: int
    superseded: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_AGENTS))


@dataclass
class _Worker:
    agent: _Agent | None = None
    published: _Published | None = None
    turn: int = 0
    """Counts accepted reports: a request whose turn is over has nothing to wait for any more."""
    held: int = 0
    """Requests waiting now; an abandoned one leaves when its connection ends."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a fresh one, when a held request has to look again."""

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass
class _Job:
    key: JobKey
    uid: str
    workers: dict[str, _Worker] = field(default_factory=dict)


class Hub:
    """Agents' reports by (job, worker), and the orders published for them."""

    def __init__(
        self,
        on_news: Callable[[JobKey], None],
        *,
        clock: Callable[[], float] = time.time,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """`on_news` is called from the event loop when a report may change a decision."""
        self._on_news = on_news
        self._clock = clock
        self._hold_seconds = hold_seconds
        self._epoch = secrets.token_hex(4)
        self._jobs: dict[str, _Job] = {}
        self._uids: dict[JobKey, str] = {}
        self._closed = False
        self._heard_at: float | None = None

    # ---- the reconciler's side

    def admit(self, key: JobKey, uid: str, workers: Collection[str]) -> None:
        """Make exactly these workers of the job known. A job of the same name but another uid is forgotten."""
        known = self._uids.get(key)
        if known is not None and known != uid:
            self.forget(known)
        job = self._jobs.setdefault(uid, _Job(key, uid))
        self._uids[key] = uid
        wanted = frozenset(workers)
        for name in [name for name in job.workers if name not in wanted]:
            job.workers.pop(name).wake()
        for name in workers:
            job.workers.setdefault(name, _Worker())

    def publish(self, uid: str, orders: Mapping[str, Order]) -> None:
        """Replace the orders of an admitted job; wakes the held requests of those workers whose order changed."""
        job = self._jobs.get(uid)
        if job is None:
            return
        for name, order in orders.items():
            job.workers.setdefault(name, _Worker())
            worker = job.workers[name]
            if worker.published is None or worker.published.order != order:
                worker.published = _Published(self._version(order), order)
                worker.wake()
        for name, worker in job.workers.items():
            if name not in orders and worker.published is not None:
                worker.published = None
                worker.wake()

    def agents(self, uid: str) -> dict[str, AgentView]:
        """Return the newest view of every agent of the job, by worker name."""
        job = self._jobs.get(uid)
        if job is None:
            return {}
        return {name: worker.agent.view for name, worker in job.workers.items() if worker.agent}

    @property
    def heard_at(self) -> float | None:
        """Unix seconds of the newest report of any agent; None before the first."""
        return self._heard_at

    def forget(self, uid: str) -> None:
        """Drop a job that is gone; its held requests end with 404."""
        job = self._jobs.pop(uid, None)
        if job is None:
            return
        if self._uids.get(job.key) == uid:
            del self._uids[job.key]
        for worker in job.workers.values():
            worker.wake()

    def uid_of(self, key: JobKey) -> str | None:
        """Return the uid of the job known by that name, or None."""
        return self._uids.get(key)

    def connected(self) -> int:
        """Return how many workers hold a request now."""
        return sum(1 for job in self._jobs.values() for worker in job.workers.values() if worker.held)

    def silences(self) -> dict[JobKey, list[float]]:
        """Return, by job, the seconds since each agent was heard of; those that have said good-bye not counted."""
        now = self._clock()
        return {
            job.key: [
                max(now - worker.agent.view.last_seen, 0.0)
                for worker in job.workers.values()
                if worker.agent and not worker.agent.view.stopping
            ]
            for job in self._jobs.values()
        }

    def close(self) -> None:
        """End every held request at once; later ones are refused with 503."""
        self._closed = True
        for job in self._jobs.values():
            for worker in job.workers.values():
                worker.wake()

    # ---- the agents' side

    async def sync(self, key: JobKey, worker_name: str, request: SyncRequest) -> SyncResponse:
        """Take a report and answer with the order: at once where it differs from the one seen, else after a while.

        Raises:
            SyncRefusedError: 404 unknown job or worker, or no order for it; 409 superseded by another agent;
                503 the coordinator is stopping.
        """
        self._refuse_when_closed()
        worker = self._worker(key, request.job_uid, worker_name)
        if self._store(key, worker, request):
            worker.turn += 1
            worker.wake()
            turn = worker.turn
        else:
            turn = 0
        return await self._answer(key, worker_name, request, turn)

    def _worker(self, key: JobKey, uid: str, name: str) -> _Worker:
        job = self._jobs.get(uid)
        if job is None or self._uids.get(key) != uid:
            raise SyncRefusedError(
                404, f"job {key} with uid {uid} is not known here", "ask again; it may be new, or deleted"
            )
        worker = job.workers.get(name)
        if worker is None:
            raise SyncRefusedError(404, f"{name} is no worker of job {key}", "ask again; it may be new, or replaced")
        return worker

    def _store(self, key: JobKey, worker: _Worker, request: SyncRequest) -> bool:
        """Keep the report; return False where a newer one of the same agent came first."""
        view = _view(request, self._clock())
        self._heard_at = view.last_seen
        agent = worker.agent
        if agent is None:
            worker.agent = _Agent(view, request.sequence)
            self._on_news(key)
            return True
        if request.agent_id in agent.superseded:
            raise _superseded(request.agent_id)
        before = agent.view
        if view.agent_id != before.agent_id:
            agent.superseded.append(before.agent_id)
        elif request.sequence < agent.sequence:
            agent.view = replace(agent.view, last_seen=view.last_seen)
            return False
        elif view.progress is None:
            view = replace(view, progress=before.progress)  # what was reached once stays known
        agent.view, agent.sequence = view, request.sequence
        if _matters(before, view):
            self._on_news(key)
        return True

    async def _answer(self, key: JobKey, name: str, request: SyncRequest, turn: int) -> SyncResponse:
        loop = asyncio.get_running_loop()
        started = loop.time()
        worker = self._worker(key, request.job_uid, name)
        while True:
            published = worker.published
            over = worker.turn != turn
            if published and (over or published.version != request.seen_version):
                return self._response(published)
            limit = self._hold_seconds if published else min(self._hold_seconds, NO_ORDER_HOLD_SECONDS)
            left = started + limit - loop.time()
            if over or left <= 0 or request.leaving:
                if published:
                    return self._response(published)
                raise SyncRefusedError(404, f"there is no order for {name} yet", "ask again")
            await self._hold(worker, left)
            self._refuse_when_closed()
            if self._worker(key, request.job_uid, name) is not worker:
                raise SyncRefusedError(404, f"{name} was forgotten and is known anew", "report again")
            if worker.agent and request.agent_id in worker.agent.superseded:
                raise _superseded(request.agent_id)

    async def _hold(self, worker: _Worker, seconds: float) -> None:
        worker.held += 1
        try:
            async with asyncio.timeout(seconds):
                await worker.changed.wait()
        except TimeoutError:
            pass
        finally:
            worker.held -= 1

    def _response(self, published: _Published) -> SyncResponse:
        return SyncResponse(version=published.version, order=published.order, hold_seconds=self._hold_seconds)

    def _version(self, order: Order) -> str:
        """Same content, same version; another operator process, another version, so that every agent reports anew."""
        text = json.dumps(order.to_wire(), sort_keys=True, separators=(",", ":"))
        return f"{self._epoch}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise SyncRefusedError(503, "the coordinator is stopping", "ask again soon; ranks go on")


def _view(request: SyncRequest, now: float) -> AgentView:
    return AgentView(
        agent_id=request.agent_id,
        address=request.address,
        last_seen=now,
        attempt=request.attempt,
        warm=request.warm,
        stopping=request.stopping,
        ranks=tuple(request.ranks),
        progress=request.progress,
        beats=tuple(request.beats),
        reported_at=now,
    )


def _superseded(agent_id: str) -> SyncRefusedError:
    return SyncRefusedError(
        409, f"agent {agent_id} was superseded by a newer agent of the same worker", "end all ranks and leave"
    )


def _matters(before: AgentView, after: AgentView) -> bool:
    """Say whether a report may change a decision; the progress of a healthy run does not."""
    if after.last_seen - before.last_seen > RECONNECT_SECONDS:
        return True
    if _standing(before) != _standing(after):
        return True
    if any(beat.overdue for beat in (*before.beats, *after.beats)):
        return True
    return _progress_mark(before.progress) != _progress_mark(after.progress)


def _standing(view: AgentView) -> tuple[object, ...]:
    ranks = tuple(sorted((r.local_rank, r.pid, r.state, r.exit_code, r.signal) for r in view.ranks))
    return view.agent_id, view.address, view.attempt, view.warm, view.stopping, ranks


def _progress_mark(progress: Progress | None) -> tuple[int, int] | None:
    return (progress.attempt, progress.checkpoint_step) if progress else None
