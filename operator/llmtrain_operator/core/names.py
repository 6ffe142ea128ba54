"""Names derived from the job alone, so that a restarted operator finds what it made before."""

from __future__ import annotations

from llmtrain_api.constants import LABEL_JOB
from llmtrain_api.job import LLMTrainJob


def worker_name(job: str, index: int, attempt: int) -> str:
    """Return the name of the worker that is created for `index` in `attempt`.

    A replacement has a new name, so it never waits for one that is still terminating.
    """
    return f"{job}-w{index}-a{attempt}"


def token_secret_name(job: LLMTrainJob) -> str:
    """Return the name of the Secret with the bearer token of the job's agents.

    Part of the uid is in it: a name that a user could have given to a Secret of their own must never be written to.
    """
    return f"{job.metadata.name}-token-{job.metadata.uid.replace('-', '')[:12]}"


def worker_selector(job: LLMTrainJob) -> str:
    """Return the label selector of the job's worker pods."""
    return f"{LABEL_JOB}={job.metadata.name}"


def run_id(job: LLMTrainJob) -> str:
    """Return the name of the run in checkpoints: the same for all attempts."""
    return f"{job.metadata.namespace}/{job.metadata.name}"


def checkpoint_uri(job: LLMTrainJob, step: int) -> str:
    """Return the address of the committed checkpoint of a step, as the trainer lays it out below the store."""
    return f"{job.spec.checkpoint.store.rstrip('/')}/step-{step:08d}"
