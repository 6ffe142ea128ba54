"""A worker in virtual time: pod, agent and ranks, as far as the operator can see and steer them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llmtrain_api.sync import Assignment, Order, Progress, RankReport
from llmtrain_api.sync_beat import Beat
from llmtrain_operator.core.observed import AgentView, Worker

HANG_SECONDS = 12.0
"""After which a rank is overdue."""

PULL_SECONDS = 0.25
"""From a node's being found to the pod's running."""


@dataclass
class SimRank:
    """One trainer process. `kill_at` is set once it was told to stop."""

    global_rank: int
    local_rank: int
    joined: bool = False
    exit_code: int | None = None
    signal: int | None = None
    by_agent: bool = False
    oom: bool = False
    exited_at: float | None = None
    kill_at: float | None = None
    hung: bool = False
    """Stopped: it does nothing more, whatever happens around it, until SIGKILL."""
    stuck_since: float | None = None
    """When it, or a rank that it waits for, hung."""

    @property
    def running(self) -> bool:
        return self.exited_at is None

    def end(self, now: float, exit_code: int | None = None, signal: int | None = None, by_agent: bool = False) -> None:
        if self.running:
            self.exit_code, self.signal, self.by_agent, self.exited_at = exit_code, signal, by_agent, now

    def beat(self, now: float, probed: bool) -> Beat:
        return Beat(
            global_rank=self.global_rank,
            phase="forward" if self.hung else "sync_wait",
            step=1,
            seconds=0.0 if self.stuck_since is None else now - self.stuck_since,
            limit_seconds=HANG_SECONDS,
            process_state="T" if self.hung else "S",
            probed=probed,
        )

    def report(self) -> RankReport:
        return RankReport(
            local_rank=self.local_rank,
            global_rank=self.global_rank,
            pid=1000 + self.global_rank,
            state="running" if self.running else "exited",
            exit_code=self.exit_code,
            signal=self.signal,
            by_agent=self.by_agent,
            oom_killed=self.oom,
            exited_at=self.exited_at,
        )


@dataclass
class SimAgent:
    """PID 1 of the pod: obeys orders as llmtrain_api.sync says."""

    address: str
    order: Order | None = None
    ranks: list[SimRank] = field(default_factory=list)
    assignment: Assignment | None = None
    last_started: int = 0
    stopping: bool = False
    progress: Progress | None = None
    exit_code: int | None = None
    """Set once it has left."""

    @property
    def attempt(self) -> int:
        return self.assignment.attempt if self.assignment else 0

    def obey(self, order: Order, now: float) -> None:
        if order.kind != "exit" and self.order and order.attempt < max(self.order.attempt, self.last_started):
            return
        self.order = order
        if order.kind == "exit":
            self.stop_ranks(now, 0.0)
            self.exit_code = order.exit_code
        elif self.attempt < order.attempt:
            self.stop_ranks(now, order.grace_seconds if order.kind == "wait" else 0.0)

    def start_if_due(self) -> None:
        """Start the ordered ranks once, when no older one is left."""
        order = self.order
        if self.stopping or order is None or order.kind != "run" or order.attempt <= self.last_started:
            return
        if any(rank.running for rank in self.ranks):
            return
        assert order.assignment is not None
        self.assignment, self.last_started, self.progress = order.assignment, order.attempt, None
        first = order.assignment.node_rank * order.assignment.ranks_per_worker
        self.ranks = [SimRank(first + i, i) for i in range(order.assignment.ranks_per_worker)]

    def stop_ranks(self, now: float, grace: float) -> None:
        for rank in self.ranks:
            if rank.running:
                rank.by_agent = True
                rank.kill_at = min(now + grace, rank.kill_at if rank.kill_at is not None else now + grace)

    def enforce_grace(self, now: float) -> None:
        for rank in self.ranks:
            if rank.running and rank.kill_at is not None and rank.kill_at <= now:
                rank.end(now, signal=9, by_agent=True)


@dataclass
class SimPod:
    """A pod as the API server and its kubelet see it."""

    name: str
    uid: str
    index: int
    created_attempt: int
    replicas: int
    created_at: float
    runs_at: float
    """When the kubelet has it running."""
    agent: SimAgent
    phase: str = "Pending"
    kill_at: float | None = None
    """End of the termination grace; set while deleting."""
    exit_code: int | None = None
    oom: bool = False
    disruption: str = ""
    cut_until: float = 0.0
    """The node cannot reach anybody until then."""
    connects_at: float = 0.0
    """When the agent next gets through to the operator."""

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def worker(self) -> Worker:
        return Worker(
            name=self.name,
            uid=self.uid,
            index=self.index,
            created_attempt=self.created_attempt,
            replicas=self.replicas,
            phase=self.phase,
            created_at=self.created_at,
            deleting=self.kill_at is not None,
            node=f"node-{self.index}",
            placed_at=None if self.phase == "Pending" else self.runs_at - PULL_SECONDS,
            exit_code=self.exit_code,
            oom_killed=self.oom,
            disruption=self.disruption,
        )

    def view(self, now: float) -> AgentView:
        agent = self.agent
        return AgentView(
            agent_id=self.uid,
            address=agent.address,
            last_seen=now,
            attempt=agent.attempt,
            warm=True,
            stopping=agent.stopping,
            ranks=tuple(rank.report() for rank in agent.ranks),
            progress=agent.progress,
            beats=tuple(
                rank.beat(now, bool(agent.order and agent.order.probe)) for rank in agent.ranks if rank.running
            ),
            reported_at=now,
        )

    def die(self, now: float, exit_code: int, oom: bool = False) -> None:
        """The agent is gone, and with it all ranks."""
        for rank in self.agent.ranks:
            rank.end(now, signal=9)
        self.phase, self.exit_code, self.oom = "Failed" if exit_code else "Succeeded", exit_code, oom


def same_report(a: AgentView | None, b: AgentView) -> bool:
    """Tell whether two views differ in nothing but the time, and in beats of which none is overdue."""
    if a is None or any(beat.overdue for beat in (*a.beats, *b.beats)):
        return False
    return replace(a, last_seen=b.last_seen, reported_at=b.reported_at, beats=b.beats) == b
