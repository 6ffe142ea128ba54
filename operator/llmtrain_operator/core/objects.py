"""Small objects beside the worker pods, as plain data; all belong to the job, so that deleting it deletes them."""

from __future__ import annotations

from typing import Any

from llmtrain_api.constants import API_VERSION, KIND, LABEL_JOB, LABEL_JOB_UID, LABEL_MANAGED_BY, MANAGED_BY_VALUE
from llmtrain_api.job import LLMTrainJob
from llmtrain_operator.core.names import token_secret_name

TOKEN_KEY = "token"
"""Key in the Secret, and so the name of the file in the pod."""


def owner_reference(job: LLMTrainJob) -> dict[str, Any]:
    """Return the reference by which Kubernetes collects a child, also while the operator is down."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def job_labels(job: LLMTrainJob) -> dict[str, str]:
    """Return the labels that every child of a job carries."""
    return {
        LABEL_JOB: job.metadata.name,
        LABEL_JOB_UID: job.metadata.uid,
        LABEL_MANAGED_BY: MANAGED_BY_VALUE,
    }


def token_secret(job: LLMTrainJob, token: str) -> dict[str, Any]:
    """Return the Secret with the bearer token of the job's agents."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": token_secret_name(job),
            "namespace": job.metadata.namespace,
            "labels": job_labels(job),
            "ownerReferences": [owner_reference(job)],
        },
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token},
    }
