"""The protocol between a worker's agent and the coordinator: one long-poll, desired state down, observed state up.

    POST /v1/jobs/{namespace}/{name}/workers/{pod}/sync      Authorization: Bearer HMAC(operator key, job uid)

The answer is always the whole desired state (an Order), so a lost answer or a restarted operator costs nothing. The
coordinator answers at once when its order differs from `seenVersion`, else it holds the request for `holdSeconds`.
When the agent has news it abandons the held request and sends a new one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from llmtrain_api.meta import ApiModel, LenientModel
from llmtrain_api.sync_beat import Beat

SYNC_PATH = "/v1/jobs/{namespace}/{name}/workers/{pod}/sync"
HOLD_SECONDS = 4.0
"""Between two signs of life of an agent without news: a node that is cut off closes no connection."""
MAX_BODY_BYTES = 1 << 20


class RankError(LenientModel):
    """What a rank wrote before it exited by itself."""

    message: Annotated[str, Field(max_length=4096)]
    """For a person: the field, the value, what is allowed, the fix, where the user is at fault."""
    exception: Annotated[str, Field(max_length=256)] = ""
    traceback: Annotated[str, Field(max_length=16384)] = ""
    time: FiniteFloat = 0.0
    """Unix seconds."""


class RankReport(LenientModel):
    """One trainer process of the agent's current or last attempt."""

    local_rank: Annotated[int, Field(ge=0, le=63)]
    global_rank: Annotated[int, Field(ge=0, le=2**31 - 1)]
    pid: int
    """In the agent's process namespace."""
    state: Literal["running", "exited"]
    exit_code: int | None = None
    """0..255 for an exit, None while running or when a signal ended it."""
    signal: int | None = None
    """The signal that ended it."""
    by_agent: bool = False
    """True where the agent itself ended the rank (order, SIGTERM): not a failure."""
    oom_killed: bool = False
    """True where the kernel's OOM killer ended it (the cgroup's counter rose)."""
    exited_at: FiniteFloat | None = None
    """Unix seconds."""
    error: RankError | None = None


class Progress(LenientModel):
    """The newest optimizer step, from rank 0 (its agent alone reports it)."""

    attempt: Annotated[int, Field(ge=0, le=2**31 - 1)]
    step: int
    """Steps done, counted from 1."""
    first_step: int
    """The first step that this attempt made: what lies before it came from the checkpoint."""
    first_step_at: FiniteFloat
    """Unix seconds when that step ended."""
    previous_step: int = -1
    """The last step that this agent saw of the attempt before; -1 where it saw none. Filled in by the agent."""
    steps: int
    tokens: int
    loss: float
    gradient_norm: float = 0.0
    tokens_per_second: float = 0.0
    memory_bytes: int = 0
    step_at: FiniteFloat
    """Unix seconds when the newest step ended."""
    checkpoint_step: int = -1
    """Newest committed checkpoint; -1 for none."""
    checkpoint_at: FiniteFloat | None = None
    resumed_from: int = -1
    skipped_checkpoints: Annotated[str, Field(max_length=1024)] = ""
    skipped_steps: int = 0
    """Steps not made since training began, because their numbers were no good."""
    checkpoint_stall_seconds: FiniteFloat = 0.0
    """How long this attempt's steps have waited for checkpoints, all together."""
    failed_checkpoint: Annotated[str, Field(max_length=1024)] = ""
    """Why the newest one could not be made; empty again once a later one is."""


class SyncRequest(LenientModel):
    protocol: Literal[1] = 1
    job_uid: Annotated[str, Field(min_length=1, max_length=64)]
    agent_id: Annotated[str, Field(min_length=1, max_length=64)]
    """Random per start of the agent: two agents that claim one pod's name can be told apart."""
    sequence: Annotated[int, Field(ge=0)]
    """Rises with every request of an agent: a late one is ignored."""
    seen_version: Annotated[str, Field(max_length=64)] = ""
    """Version of the order that the agent has in force."""
    address: Annotated[str, Field(min_length=1, max_length=253)]
    attempt: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Attempt of `ranks`; 0 before any."""
    warm: bool = False
    """The fork-server has finished importing."""
    stopping: bool = False
    """The agent itself was told to leave (SIGTERM)."""
    leaving: bool = False
    """Its last report: it takes no further order, so the answer comes at once."""
    ranks: Annotated[list[RankReport], Field(max_length=64)] = Field(default_factory=list)
    progress: Progress | None = None
    beats: Annotated[list[Beat], Field(max_length=64)] = Field(default_factory=list)
    """Of the running ranks of `attempt`."""


class Assignment(LenientModel):
    """Everything an agent needs to start its ranks."""

    attempt: int
    node_rank: int
    num_nodes: int
    ranks_per_worker: int
    master_address: str
    master_port: int
    run_id: str
    """Names the run in checkpoints and in the rendezvous store's prefix: `namespace/name`."""
    spec: dict[str, Any]
    """The job's spec as applied (the trainer parses it with the same types)."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_worker


class Order(LenientModel):
    """The desired state of one agent.

    wait: no ranks older than `attempt` may run; end them (SIGTERM, then SIGKILL after graceSeconds; 0 = SIGKILL now).
    run:  as wait with grace 0, and the ranks of `attempt` are started once (never again for the same attempt).
    exit: end all ranks and leave with exitCode.
    """

    kind: Literal["wait", "run", "exit"]
    attempt: int = 0
    grace_seconds: float = 0.0
    exit_code: int = 0
    assignment: Assignment | None = None
    probe: bool = False
    """A hang is suspected somewhere in the job: ask all ranks for their stacks once, and report every 2 s."""


class SyncResponse(LenientModel):
    version: str
    order: Order
    hold_seconds: float = HOLD_SECONDS


class SyncError(ApiModel):
    """Body of every refusal.

    400 malformed, 401 no token, 403 token of another job, 404 unknown job or pod, 409 superseded.
    """

    error: str
    fix: str = ""
