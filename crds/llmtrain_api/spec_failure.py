"""What a model engineer writes under `spec.failurePolicy`: budgets and deadlines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmtrain_api.meta import ApiModel, Count32


class Deadlines(ApiModel):
    """Every waiting phase ends. Times in seconds."""

    pending_seconds: Annotated[int, Field(ge=1, le=31_536_000, json_schema_extra={"format": "int32"})] = 1800
    """From a pod's creation until its agent reports."""
    image_pull_seconds: Annotated[int, Field(ge=1, le=31_536_000, json_schema_extra={"format": "int32"})] = 300
    """How long an image may fail to be pulled."""
    start_seconds: Annotated[int, Field(ge=1, le=31_536_000, json_schema_extra={"format": "int32"})] = 1800
    """From the order to start until the first optimizer step of the attempt."""
    stop_seconds: Annotated[int, Field(ge=0, le=86_400, json_schema_extra={"format": "int32"})] = 60
    """Between SIGTERM and SIGKILL: a step and a checkpoint must fit. Also the pods' termination grace."""


class Budgets(ApiModel):
    """Restarts allowed per failure class since the committed checkpoint last advanced. 0: fail at once."""

    out_of_memory: Count32 = 1
    """A rank or its container was killed for want of memory."""
    hardware: Count32 = 6
    """A device is broken, as its node or its device plugin says."""
    numerics: Count32 = 1
    """Loss or gradient was not finite."""
    checkpoint: Count32 = 3
    """A checkpoint could not be written or read."""
    node_lost: Count32 = 20
    """A node went away, or was cut off."""
    hang: Count32 = 4
    """Ranks made no step, although none had ended."""
    crash: Count32 = 6
    """A rank ended by itself, by any other exit code or signal."""
    startup: Count32 = 3
    """A worker or its ranks did not start in time."""
    communication: Count32 = 6
    """Ranks lost each other and no other cause was reported."""


class HangLimits(ApiModel):
    """How long a rank may stay in one part of a step: factor x p99 of its own newest steps + floorSeconds.

    A large floorSeconds turns the detection off.
    """

    factor: Annotated[int, Field(ge=1, le=1000, json_schema_extra={"format": "int32"})] = 3
    """So many times the 99th percentile of the durations of the rank's newest 256 steps."""
    floor_seconds: Annotated[int, Field(ge=1, le=31_536_000, json_schema_extra={"format": "int32"})] = 10
    """So much longer. With the default, a hang is noticed before the process group gives up on it."""


class FailurePolicy(ApiModel):
    """How much hurt a job takes before it fails with the first cause. May be changed while the job runs."""

    budgets: Budgets = Budgets()
    deadlines: Deadlines = Deadlines()
    hang: HangLimits = HangLimits()
