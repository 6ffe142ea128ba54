"""What each rank is given: its environment and its RankLaunch document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain_api.launch import RankLaunch
from llmtrain_api.sync import Assignment
from llmtrain_trainer.agent.settings import Settings
from llmtrain_trainer.heartbeat import beat_file, stacks_file

LAUNCH_VARIABLE = "LLMTRAIN_LAUNCH"
"""The RankLaunch of a rank, as JSON, in its environment."""
FLIGHT_RECORDS = "nccl_trace_rank_"
"""How the names of NCCL's flight records begin, in the folder of the attempt: they outlive the rank."""


@dataclass(frozen=True)
class RankStart:
    """One rank as the fork-server is asked to start it."""

    local_rank: int
    global_rank: int
    environment: dict[str, str]
    """Added to the fork-server's own."""
    error_file: Path

    def to_message(self) -> dict[str, Any]:
        return {
            "name": f"ltrank-{self.global_rank}",
            "environment": self.environment,
            "errorFile": str(self.error_file),
        }


def rank_starts(settings: Settings, assignment: Assignment, folder: Path, progress_socket: Path) -> list[RankStart]:
    """Return the ranks of this worker in an attempt; `folder` is the attempt's own, for the error files."""
    return [
        _rank_start(settings, assignment, local_rank, folder, progress_socket)
        for local_rank in range(assignment.ranks_per_worker)
    ]


def _rank_start(
    settings: Settings, assignment: Assignment, local_rank: int, folder: Path, progress_socket: Path
) -> RankStart:
    error_file = folder / f"rank-{local_rank}.error.json"
    launch = RankLaunch(
        run_id=assignment.run_id,
        job_uid=settings.job_uid,
        attempt=assignment.attempt,
        global_rank=assignment.node_rank * assignment.ranks_per_worker + local_rank,
        local_rank=local_rank,
        node_rank=assignment.node_rank,
        world_size=assignment.world_size,
        local_world_size=assignment.ranks_per_worker,
        master_address=assignment.master_address,
        master_port=assignment.master_port,
        spec=assignment.spec,
        volumes=dict(settings.volumes),
        error_file=str(error_file),
        progress_socket=str(progress_socket),
        beat_file=str(beat_file(folder, local_rank)),
        stacks_file=str(stacks_file(folder, local_rank)),
    )
    environment = {
        "RANK": str(launch.global_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "NODE_RANK": str(launch.node_rank),
        "GROUP_RANK": str(launch.node_rank),
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / FLIGHT_RECORDS),
        LAUNCH_VARIABLE: launch.model_dump_json(by_alias=True),
    }
    return RankStart(local_rank, launch.global_rank, environment, error_file)
