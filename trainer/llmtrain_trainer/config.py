"""One rank's view of the run, decided once: the parsed spec, its own place, and the folders it uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from llmtrain_api.constants import API_VERSION, KIND, VOLUME_ROOT, Env
from llmtrain_api.launch import RankLaunch
from llmtrain_api.presets import ModelDimensions
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_api.uris import Uri
from llmtrain_api.validation import complete, rule_problems
from llmtrain_trainer.errors import UserError
from llmtrain_trainer.parallel.mesh import ParallelShape

DEFAULT_WORK_DIR = "/tmp/llmtrain"


@dataclass(frozen=True)
class RunConfig:
    """Everything that is known before the first collective."""

    launch: RankLaunch
    spec: LLMTrainJobSpec
    dimensions: ModelDimensions
    device: torch.device
    work_dir: Path
    """A writable folder of this worker alone; the token cache lies here."""

    @classmethod
    def of(cls, launch: RankLaunch) -> RunConfig:
        """Parse and check what one rank was given.

        Raises:
            pydantic.ValidationError: the spec does not parse.
            UserError: the model's dimensions, the layout, the batch or the device are impossible, or a rule is broken.
        """
        spec = LLMTrainJobSpec.model_validate(launch.spec)
        config = cls(
            launch=launch,
            spec=spec,
            dimensions=_checked_dimensions(spec),
            device=_device(spec, launch.local_rank),
            work_dir=Path(os.environ.get(Env.WORK_DIR, DEFAULT_WORK_DIR)),
        )
        config.shape.check(config.dimensions)
        config.micro_batches_per_step  # noqa: B018  checks the batch's divisibility before anything is started
        _check_rules(launch.spec)
        return config

    @cached_property
    def shape(self) -> ParallelShape:
        """How the ranks are laid out."""
        parallelism = self.spec.parallelism
        return ParallelShape.of(
            self.launch.world_size,
            replicate=parallelism.replicate,
            tensor=parallelism.tensor,
            context=parallelism.context,
            pipeline=parallelism.pipeline,
            expert=parallelism.expert,
        )

    @cached_property
    def micro_batches_per_step(self) -> int:
        """Forward passes of one rank in one optimizer step (gradient accumulation)."""
        training, readers = self.spec.training, self.shape.data_ranks
        per_pass = readers * training.micro_batch_size
        if training.global_batch_size % per_pass:
            raise UserError(
                "training.globalBatchSize",
                training.global_batch_size,
                f"{readers} data-parallel ranks of microBatchSize {training.micro_batch_size} cannot share it evenly",
                allowed=f"a multiple of {per_pass}",
                fix=f"use {-(-training.global_batch_size // per_pass) * per_pass}, or change training.microBatchSize",
            )
        return training.global_batch_size // per_pass

    @property
    def is_first(self) -> bool:
        """True on the rank that owns the store, the manifest and the metrics."""
        return self.launch.global_rank == 0

    @property
    def tokens_per_step(self) -> int:
        return self.spec.training.global_batch_size * self.dimensions.sequence_length

    @property
    def start_timeout_seconds(self) -> float:
        """How long one rank waits for another while starting."""
        return float(self.spec.failure_policy.deadlines.start_seconds)

    def local_path(self, field: str, uri: str) -> Path:
        """Return where `uri` lies on this worker.

        Raises:
            UserError: the address is malformed, or its claim is not mounted here.
        """
        try:
            parsed = Uri.parse(uri)
            path = Path(parsed.local_path(self.launch.volumes))
        except ValueError as error:
            allowed = "pvc://CLAIM/PATH or file:///PATH"
            raise UserError(field, uri, str(error), allowed=allowed, fix="correct the address") from error
        if parsed.scheme == "pvc":
            root = Path(self.launch.volumes.get(parsed.claim, f"{VOLUME_ROOT}/{parsed.claim}"))
            if not root.is_dir():
                raise UserError(
                    field,
                    uri,
                    f"the claim {parsed.claim!r} is not mounted: there is no folder {root} in the worker",
                    allowed="a PersistentVolumeClaim of the job's namespace (locally: a folder given for it)",
                    fix=f"create the claim {parsed.claim!r}, or correct its name",
                )
        return path


def _check_rules(spec: dict[str, Any]) -> None:
    """Refuse what the resource's own rules refuse: nobody has to have asked them, or an older CRD let it pass."""
    manifest = complete({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "job"}, "spec": spec})
    for problem in rule_problems(manifest):
        field = problem.path.removeprefix("spec.")
        raise UserError(field, problem.value, problem.message, allowed=problem.allowed, fix=problem.fix)


def _checked_dimensions(spec: LLMTrainJobSpec) -> ModelDimensions:
    try:
        dims = spec.model.dimensions()
    except ValueError as error:
        allowed = "a preset, or all dimensions"
        raise UserError("model", spec.model.to_wire(), str(error), allowed=allowed, fix="add them") from error
    checks = [
        ("heads", dims.heads, dims.dim % dims.heads == 0, f"a divisor of model.dim ({dims.dim})"),
        ("kvHeads", dims.kv_heads, dims.heads % dims.kv_heads == 0, f"a divisor of model.heads ({dims.heads})"),
        ("dim", dims.dim, (dims.dim // dims.heads) % 2 == 0, f"dim / heads even (rotary pairs), heads {dims.heads}"),
    ]
    for name, value, right, allowed in checks:
        if not right:
            raise UserError(f"model.{name}", value, "does not fit the others", allowed=allowed, fix="change it")
    return dims


def _device(spec: LLMTrainJobSpec, local_rank: int) -> torch.device:
    wanted = spec.workers.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            "workers.device",
            spec.workers.device,
            f"local rank {local_rank} needs its own GPU, and this worker sees {count}",
            allowed="cuda with at least ranksPerWorker GPUs, or cpu",
            fix="set workers.accelerator.count to workers.ranksPerWorker, or workers.device to cpu",
        )
    return torch.device("cuda", local_rank)
