"""What an agent gives to each rank: one JSON document, beside the usual RANK, WORLD_SIZE, MASTER_* variables."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from llmtrain_api.meta import ApiModel


class RankLaunch(ApiModel):
    run_id: str
    job_uid: str = ""
    attempt: int
    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    master_address: str
    master_port: int
    spec: dict[str, Any]
    """The job's spec; parse with LLMTrainJobSpec."""
    volumes: dict[str, str] = Field(default_factory=dict)
    """Claim name to folder, for pvc:// addresses; a claim that is not listed lies at VOLUME_ROOT/claim."""
    error_file: str
    """Where the rank writes a sync.RankError (JSON, to a temporary name, then renamed) before a failing exit."""
    progress_socket: str = ""
    """Unix datagram socket: rank 0 sends one sync.Progress JSON per step, never blocking. Empty: nobody listens."""
    beat_file: str = ""
    """Where the rank writes its heartbeat. Empty: nobody reads it."""
    stacks_file: str = ""
    """Where the rank appends the stacks of all its threads at SIGUSR2. Empty: it does not."""
