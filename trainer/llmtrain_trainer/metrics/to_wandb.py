"""Steps for Weights & Biases. Imported by the sink's thread alone: the package may be missing."""

from __future__ import annotations

import hashlib
from typing import Any

import wandb

from llmtrain_api.constants import CONTAINER
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.metrics.record import StepRecord, curves


class WandbSink:
    """One run for all attempts of a job."""

    def __init__(self, run: Any) -> None:
        self._run = run
        # By our own steps: W&B's only rise, and would refuse those that a restart repeats.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def write(self, record: StepRecord) -> None:
        self._run.log({"step": record.step, **curves(record)})

    def close(self) -> None:
        self._run.finish()


def open_sink(config: RunConfig, first: StepRecord) -> WandbSink:
    """Open, or go on with, the job's run in the project that spec.metrics.wandb names.

    Raises:
        RuntimeError: there is no key.
        wandb.errors.Error: the server refuses, or cannot be reached.
    """
    settings, launch = config.spec.metrics.wandb, config.launch
    assert settings is not None
    if settings.mode == "online" and not wandb.api.api_key:  # asked for here, wandb would ask the terminal and wait
        raise RuntimeError(
            "metrics.wandb.mode online needs a key, and the environment has no WANDB_API_KEY; fix: set it in "
            f"workers.template for the container {CONTAINER}, from a Secret, or use mode offline"
        )
    store = config.spec.checkpoint.store
    # Behind S3 there is no folder for it.
    folder = config.work_dir if store.startswith("s3://") else config.local_path("checkpoint.store", store)
    run = wandb.init(
        project=settings.project,
        entity=settings.entity,
        name=launch.run_id,
        id=hashlib.sha256((launch.job_uid or launch.run_id).encode()).hexdigest()[:16],
        resume=None if settings.mode == "offline" else "allow",
        mode=settings.mode,
        dir=str(folder),
        config=config.spec.to_wire(),
        # Our output and the machine are watched by others; threads and processes of it would only take time.
        settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True),
    )
    return WandbSink(run)
