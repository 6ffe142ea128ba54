"""Where spec.checkpoint says that checkpoints lie: the store that all share, and the tiers of each worker's own."""

from __future__ import annotations

from pathlib import Path

from llmtrain_api.uris import Uri
from llmtrain_trainer.checkpoint.base import FIELD, Store
from llmtrain_trainer.checkpoint.local import LocalTier
from llmtrain_trainer.checkpoint.store import CheckpointStore
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import UserError

MEMORY = Path("/dev/shm")
"""A file system in the node's memory: in a pod, an emptyDir of the operator's, which outlives every process in it."""


def store_of(config: RunConfig) -> Store:
    """Return the store of spec.checkpoint.store.

    Raises:
        UserError: the address is malformed, its claim is not mounted here, or the library it needs is not installed.
    """
    uri, launch = config.spec.checkpoint.store, config.launch
    if uri.startswith("s3://"):
        try:
            from llmtrain_trainer.checkpoint.objects import ObjectStore
        except ImportError as error:
            raise UserError(
                FIELD,
                uri,
                f"S3 needs a library that is not installed: {error}",
                allowed="pvc://CLAIM/PATH or file:///PATH, as long as it is not",
                fix="install s3fs in the workers' image",
            ) from error
        return ObjectStore(Uri.parse(uri), config)
    root = config.local_path(FIELD, uri)
    return CheckpointStore(root, uri=uri, run_id=launch.run_id, attempt=launch.attempt, job_uid=launch.job_uid)


def local_tiers_of(config: RunConfig) -> list[LocalTier]:
    """Return the tiers of this worker's own, the fastest first."""
    checkpoint = config.spec.checkpoint
    tiers = []
    if memory := checkpoint.memory:
        tiers.append(LocalTier(config, "memory", MEMORY, every_steps=memory.every_steps, keep=memory.keep))
    if disk := checkpoint.disk:
        root = Path(disk.path) if disk.path else config.work_dir
        tiers.append(LocalTier(config, "disk", root, every_steps=disk.every_steps, keep=disk.keep))
    return tiers
