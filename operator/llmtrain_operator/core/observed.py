"""What a decision is made from: one frozen snapshot of a job, its workers and their agents."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmtrain_api.constants import RENDEZVOUS_PORT_BASE, RENDEZVOUS_PORT_SPAN
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.sync import Progress, RankReport
from llmtrain_api.sync_beat import Beat


@dataclass(frozen=True)
class Policy:
    """What the platform engineer decides for all jobs (operator settings)."""

    status_period_seconds: float = 30.0
    """A healthy job's progress is written this often."""
    settle_seconds: float = 5.0
    """How long a mere symptom (a lost peer) waits for the report of its cause."""
    agent_lost_seconds: float = 12.0
    """A running worker whose agent was silent this long, while others report, is lost. Agents report every 4 s."""
    node_lost_silence_seconds: float = 5.0
    """The same where also the API server says that its node is gone."""
    relax_seconds: float = 30.0
    """A worker that finds no node this long may be placed on nodes that are avoided."""
    backoff_seconds: float = 1.0
    """The third restart without progress waits twice this long, each later one twice as long as the one before."""
    backoff_limit_seconds: float = 60.0
    """The longest such wait."""
    accelerator_hour_price: float = 0.0
    """What one accelerator costs in an hour, in any currency; 0: not known."""
    rendezvous_port_base: int = RENDEZVOUS_PORT_BASE
    """The store of attempt N listens on base + N mod span. Jobs that share a network (a laptop) need other bases."""
    rendezvous_port_span: int = RENDEZVOUS_PORT_SPAN


@dataclass(frozen=True)
class AgentView:
    """What the coordinator last heard from the agent of a worker."""

    agent_id: str
    address: str
    last_seen: float
    """Unix seconds. A held long-poll counts as seen now."""
    attempt: int = 0
    warm: bool = False
    stopping: bool = False
    ranks: tuple[RankReport, ...] = ()
    progress: Progress | None = None
    beats: tuple[Beat, ...] = ()
    """Of the running ranks, as old as the report."""
    reported_at: float = 0.0
    """Unix seconds when the newest report came; unlike last_seen, a held request does not make it younger."""


@dataclass(frozen=True)
class Worker:
    """A worker as its backend sees it: a pod on a cluster, a process group on a laptop."""

    name: str
    """Pod name: {job}-w{index}-a{attempt of its creation}."""
    uid: str
    index: int
    created_attempt: int
    replicas: int
    """Size of the gang this worker was created for."""
    phase: str
    """Pending | Running | Succeeded | Failed, as Kubernetes says it."""
    created_at: float
    """Unix seconds."""
    deleting: bool = False
    node: str = ""
    placed_at: float | None = None
    """Unix seconds; when it got its node, None where that is not told."""
    waiting_reason: str = ""
    """Of the trainer container: ErrImagePull, ImagePullBackOff, InvalidImageName, CreateContainerConfigError ..."""
    waiting_message: str = ""
    waiting_since: float | None = None
    """Unix seconds; when the reason above was first seen."""
    unschedulable_message: str = ""
    avoids: tuple[str, ...] = ()
    """Nodes where it must not be placed."""
    node_lost: str = ""
    """What the API server says of a node that went away; empty where the node is there."""
    hardware: str = ""
    """What its node says of broken hardware: it explains a failure, and is none by itself."""
    broken_device: str = ""
    """What the device plugin says of a device that this worker holds: it will not work any more."""
    exit_code: int | None = None
    """Of the agent, once the container has ended (137: killed)."""
    oom_killed: bool = False
    disruption: str = ""
    """Reason of the DisruptionTarget condition or of an eviction, if any."""
    agent: AgentView | None = None
    """None where no agent has reported since the operator started."""


@dataclass(frozen=True)
class Observed:
    """Everything that `plan` may look at."""

    job: LLMTrainJob
    now: float
    """Unix seconds."""
    workers: tuple[Worker, ...] = ()
    """All of them, also deleting, failed, and those of older attempts; any order."""
    spec_errors: tuple[str, ...] = ()
    """Rules of the contract that the stored spec breaks (an old CRD may have let it pass)."""
    store_owner: str = ""
    """namespace/name of an older, unfinished job that uses the same checkpoint store; empty where there is none."""
    policy: Policy = field(default_factory=Policy)
    heard_at: float | None = None
    """Unix seconds when any agent of any job last reported: whether it is the operator that is cut off."""
    observing_since: float | None = None
    """Unix seconds since when agents could reach this operator. None: an agent not heard of is never judged lost."""
