"""The part of the spec that says who is told about each step, besides metrics.jsonl and the worker's own output."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmtrain_api.meta import ApiModel
from llmtrain_api.uris import STORE_PATTERN

PROJECT_PATTERN = r"^[^\s/\\#?%:]+$"


class Tensorboard(ApiModel):
    """Event files for TensorBoard. Needs the package tensorboard in the trainer's image (extra `tensorboard`)."""

    uri: Annotated[str, Field(min_length=1, max_length=1024, pattern=STORE_PATTERN)]
    """Folder of the event files: pvc://CLAIM/PATH or file:///PATH. All attempts write to it."""


class Wandb(ApiModel):
    """Weights & Biases. Needs the package wandb in the trainer's image (extra `wandb`).

    Its key is the environment variable WANDB_API_KEY of the container `trainer`, by workers.template, from a Secret.
    All attempts of a job are one run.
    """

    project: Annotated[str, Field(min_length=1, max_length=128, pattern=PROJECT_PATTERN)]
    """Project that the run belongs to."""
    entity: Annotated[str, Field(min_length=1, max_length=128, pattern=PROJECT_PATTERN)] | None = None
    """User or team that owns the project. Default: that of the key."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: nothing is sent; files lie in the folder wandb of checkpoint.store, for `wandb sync`. With a store
    behind S3, in that of worker 0's /tmp/llmtrain."""


class Prometheus(ApiModel):
    """An HTTP endpoint of rank 0, /metrics of its pod. Nothing is pushed."""

    port: Annotated[int, Field(ge=1024, le=65535, json_schema_extra={"format": "int32"})]
    """TCP port of the endpoint."""


class Metrics(ApiModel):
    """Who is told about each step. One that is missing, slow or broken costs a warning, never a step."""

    tensorboard: Tensorboard | None = None
    wandb: Wandb | None = None
    prometheus: Prometheus | None = None
