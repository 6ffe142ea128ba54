"""A cluster in virtual time that runs the very `core.plan` against faults, and checks what must always hold.

The operator of the simulation can die between any two side effects and then knows only what is durable: the job's
status and the pods. Training is modelled as far as restarts need it: all ranks step together or not at all, commit
checkpoints into one store, and exit as the real trainer does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from llmtrain_api.constants import TERMINAL_STATES, Action, State
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.sync import Assignment, Order, Progress
from llmtrain_operator.core.actions import CreateWorker, DeleteWorker, Event, Plan
from llmtrain_operator.core.gang import is_live
from llmtrain_operator.core.observed import AgentView, Observed, Policy, Worker
from llmtrain_operator.core.plan import plan
from tests.support.jobs import NOW, JobBuilder
from tests.support.sim_worker import SimAgent, SimPod, SimRank, same_report

TICK = 0.5
RECONNECT_SECONDS = 4.0


class OperatorDiedError(Exception):
    """The operator was killed between two side effects."""


@dataclass
class Store:
    """The checkpoint store."""

    step: int = 0
    saved_at: float | None = None


@dataclass
class ClusterSim:
    builder: JobBuilder
    seed: int = 0
    policy: Policy = field(default_factory=Policy)
    every_steps: int = 5
    cache_lag: int = 0
    """Ticks by which the operator's view of pods is late."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.job: LLMTrainJob = self.builder.build()
        self.now = NOW
        self.pods: dict[str, SimPod] = {}
        self.store = Store()
        self.step = 0
        self.made = 0
        self._stepped_at = 0.0
        self.writes: list[tuple[float, LLMTrainJobStatus]] = []
        self.events: list[Event] = []
        self.job_deleted = False
        self.api_down_until = 0.0
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.die_after: int | None = None
        """Side effects until the operator dies."""
        self._history: list[list[Worker]] = []
        self._boot(self.now)

    # ---- the world

    @property
    def status(self) -> LLMTrainJobStatus:
        return self.job.status

    def run(self, seconds: float, until_end: bool = True) -> None:
        """Let time pass; stop early when the job has ended and its workers have left."""
        end = self.now + seconds
        while self.now < end:
            self.tick()
            if until_end and self.status.state in TERMINAL_STATES and all(p.finished for p in self.pods.values()):
                return

    def tick(self) -> None:
        self.now += TICK
        for due in [entry for entry in self._later if entry[0] <= self.now]:
            self._later.remove(due)
            due[1]()
        self._kubelets()
        for pod in self._alive():
            pod.agent.enforce_grace(self.now)
            pod.agent.start_if_due()
        self._train()
        self._history = [*self._history, [pod.worker() for pod in self.pods.values()]][-4:]
        self._sync()
        if self.now >= self.operator_up_at and (self.dirty or self.now >= self.look_at):
            self._reconcile()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((self.now + seconds, act))

    def edit(self, **fields: object) -> None:
        """Change the job's spec (camelCase), as its owner would."""
        self.builder.with_spec(**fields).with_metadata(generation=self.job.metadata.generation + 1)
        self.job = self.builder.build().model_copy(update={"status": self.status})
        self.dirty = True

    def _alive(self) -> list[SimPod]:
        return [pod for pod in self.pods.values() if pod.phase == "Running"]

    def _kubelets(self) -> None:
        for pod in list(self.pods.values()):
            if pod.phase == "Pending" and pod.kill_at is None and self.now >= pod.runs_at:
                pod.phase, pod.connects_at, self.dirty = "Running", self.now, True
            idle = not any(rank.running for rank in pod.agent.ranks)
            if pod.phase == "Running" and pod.agent.exit_code is not None:
                pod.die(self.now, pod.agent.exit_code)
                self.dirty = True
            gone = pod.phase != "Running" or idle or (pod.kill_at is not None and self.now >= pod.kill_at)
            if pod.kill_at is not None and gone and self.now >= pod.cut_until:
                self._remove(pod)

    def _remove(self, pod: SimPod) -> None:
        for rank in pod.agent.ranks:
            rank.end(self.now, signal=9)
        self.pods.pop(pod.name, None)
        self.dirty = True

    # ---- training

    def _train(self) -> None:
        groups: dict[int, list[tuple[SimPod, SimRank]]] = {}
        for pod in self._alive():
            for rank in pod.agent.ranks:
                groups.setdefault(pod.agent.attempt, []).append((pod, rank))
        for attempt in sorted(groups):
            self._train_attempt(attempt, groups[attempt])

    def _train_attempt(self, attempt: int, group: list[tuple[SimPod, SimRank]]) -> None:
        assignments = [pod.agent.assignment for pod, _ in group]
        self._check_assignments([a for a in assignments if a])
        first = assignments[0]
        assert first is not None
        reachable = all(self.now >= pod.cut_until for pod, _ in group)
        whole = len(group) == first.world_size and all(rank.running for _, rank in group) and reachable
        if not whole:
            self._lose_peers([rank for _, rank in group if rank.joined])
            return
        if not all(rank.joined for _, rank in group):
            self.step = self.store.step
            for _, rank in group:
                rank.joined = True
            return
        if any(rank.hung for _, rank in group):
            for _, rank in group:
                rank.stuck_since = rank.stuck_since or self.now
            return
        if any(rank.kill_at is not None for _, rank in group):
            self._save()
            for _, rank in group:
                rank.end(self.now, exit_code=143, by_agent=rank.by_agent)
            return
        assert self._stepped_at != self.now, "ranks of two attempts train at the same time"
        self._stepped_at = self.now
        self._make_step(attempt, group)

    def _make_step(self, attempt: int, group: list[tuple[SimPod, SimRank]]) -> None:
        done = self.step >= self.job.spec.training.steps
        if not done:
            self.step += 1
            if self.step % self.every_steps == 0 or self.step == self.job.spec.training.steps:
                self._save()
        leader = next(pod.agent for pod, rank in group if rank.global_rank == 0)
        old = leader.progress
        leader.progress = Progress(
            attempt=attempt,
            step=self.step,
            first_step=old.first_step if old else self.step,
            first_step_at=old.first_step_at if old else self.now,
            steps=self.job.spec.training.steps,
            tokens=self.step * 100,
            loss=10.0 / (self.step + 1),
            tokens_per_second=100.0,
            step_at=self.now,
            checkpoint_step=self.store.step or -1,
            checkpoint_at=self.store.saved_at,
        )
        if done:
            for _, rank in group:
                rank.end(self.now, exit_code=0)

    def _save(self) -> None:
        assert self.step >= self.store.step, "a stale rank wrote an older checkpoint over a newer one"
        self.store.step, self.store.saved_at = self.step, self.now

    def _lose_peers(self, ranks: list[SimRank]) -> None:
        for rank in ranks:
            if rank.running and not rank.hung and self.random.random() < 0.5:
                rank.end(self.now, exit_code=75, by_agent=rank.by_agent)

    def _check_assignments(self, assignments: list[Assignment]) -> None:
        common = {(a.attempt, a.master_address, a.master_port, a.num_nodes, a.ranks_per_worker) for a in assignments}
        assert len(common) == 1, f"ranks of one attempt were told different things: {common}"

    # ---- agents and the operator

    def _sync(self) -> None:
        if self.now < self.operator_up_at:
            return
        for pod in self._alive():
            if self.now < max(pod.connects_at, pod.cut_until) or pod.agent.exit_code is not None:
                continue
            view = pod.view(self.now)
            self.dirty |= not same_report(self.views.get(pod.name), view)
            self.views[pod.name] = view
            order = self.orders.get(pod.name)
            if order is not None and order != pod.agent.order:
                pod.agent.obey(order, self.now)

    def _boot(self, at: float) -> None:
        """The operator starts with an empty memory."""
        self.operator_up_at = at
        self.views: dict[str, AgentView] = {}
        self.orders: dict[str, Order] = {}
        self.look_at = float("inf")
        self.dirty = True
        for pod in self.pods.values():
            pod.connects_at = at + self.random.uniform(0, RECONNECT_SECONDS)

    def crash_operator(self, down_seconds: float = 0.0) -> None:
        self._boot(self.now + down_seconds)

    def observed(self) -> Observed:
        known = self._history[-1 - min(self.cache_lag, len(self._history) - 1)] if self._history else []
        self.views = {name: view for name, view in self.views.items() if name in self.pods}
        workers = [replace(worker, agent=self.views.get(worker.name)) for worker in known]
        self.random.shuffle(workers)
        return Observed(
            job=self.job,
            now=self.now,
            workers=tuple(workers),
            policy=self.policy,
            observing_since=self.operator_up_at,
        )

    def _reconcile(self) -> None:
        self.dirty = False
        decision = plan(self.observed())
        self._check_plan(decision)
        # A late cache is a state that will change without a sign.
        look_again = decision.requeue_after if self.cache_lag == 0 or decision.requeue_after else 1.0
        self.look_at = self.now + look_again if look_again is not None else float("inf")
        try:
            self._carry_out(decision)
        except OperatorDiedError:
            self.die_after = None
            self.crash_operator(self.random.uniform(0, 5))
        except ConnectionError:
            self.look_at = self.now + 1.0

    def _carry_out(self, decision: Plan) -> None:
        if decision.status_changed:
            self._effect()
            wire = decision.status.to_wire()
            durable = LLMTrainJobStatus.model_validate(wire)
            assert durable.attempt >= self.status.attempt, "the attempt went back"
            assert durable.started_attempt <= durable.attempt
            self.job = self.job.model_copy(update={"status": durable})
            self.writes.append((self.now, durable))
            self.dirty = True
        for worker in decision.delete:
            self._effect()
            self.delete_pod(worker)
        for create in decision.create:
            self._effect()
            self._create(create)
        self._effect()
        self.orders = dict(decision.orders)
        self.events.extend(decision.events)
        self.job_deleted |= decision.delete_job

    def _effect(self) -> None:
        if self.now < self.api_down_until:
            raise ConnectionError("the API server is away")
        if self.die_after is not None:
            if self.die_after <= 0:
                raise OperatorDiedError
            self.die_after -= 1

    def _create(self, create: CreateWorker) -> None:
        if create.name in self.pods:
            return
        self.made += 1
        self.pods[create.name] = SimPod(
            name=create.name,
            uid=f"uid-{self.made}",
            index=create.index,
            created_attempt=create.attempt,
            replicas=self.job.spec.workers.replicas,
            created_at=self.now,
            runs_at=self.now + self.random.uniform(0.5, 2.0),
            agent=SimAgent(address=f"10.0.0.{self.made}"),
        )
        self.dirty = True

    def delete_pod(self, worker: DeleteWorker) -> None:
        """Delete as the API server does: grace 0 takes the object away at once, else the kubelet sends SIGTERM."""
        pod = self.pods.get(worker.name)
        if pod is None or pod.uid != worker.uid:
            return
        grace = self.job.spec.failure_policy.deadlines.stop_seconds if worker.grace_seconds is None else 0.0
        if grace == 0 or pod.phase != "Running":
            self._remove(pod)
            return
        pod.kill_at = pod.kill_at or self.now + grace
        pod.agent.stopping = True
        pod.agent.stop_ranks(self.now, grace)
        self.dirty = True

    def _check_plan(self, decision: Plan) -> None:
        status = decision.status
        assert decision == plan(self.observed()), "the plan depends on the order of the workers"
        runs = {n: o.assignment for n, o in decision.orders.items() if o.kind == "run"}
        for name, assignment in runs.items():
            assert assignment is not None
            assert assignment.attempt == status.attempt == status.started_attempt, "ordered before it was durable"
            assert name in self.pods or self.cache_lag
        if runs:
            assert len(runs) == self.job.spec.workers.replicas
            assert sorted(a.node_rank for a in runs.values() if a) == list(range(len(runs)))
            assert len({(a.master_address, a.master_port) for a in runs.values() if a}) == 1
        going = {delete.uid for delete in decision.delete}
        staying = [w for w in self.observed().workers if w.uid not in going and is_live(w)]
        if status.state not in TERMINAL_STATES:
            assert len({w.index for w in staying}) == len(staying), "two live workers of one index"
        assert len({create.index for create in decision.create}) == len(decision.create)
        if status.state in TERMINAL_STATES:
            assert not decision.create
            assert {o.kind for o in decision.orders.values()} <= {"exit"}
        if self.status.state in TERMINAL_STATES:
            assert status.state == self.status.state and not decision.status_changed

    # ---- facts for tests

    def restarts(self) -> int:
        return self.status.restarts.total

    def recorded(self) -> list[tuple[str, Action]]:
        return [(f.failure_class.value, f.action) for f in self.status.failures]

    @property
    def state(self) -> State | None:
        return self.status.state
