"""What pvc://CLAIM means on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmtrain_api.job import LLMTrainJob
from llmtrain_api.uris import Uri
from llmtrain_operator.core.worker_pod import claims
from llmtrain_operator.local.records import LocalStateError, Records


def claims_of(job: LLMTrainJob) -> list[str]:
    """Return the claims that a job's addresses name."""
    return claims(job.spec)


def settle_volumes(records: Records, job: LLMTrainJob, wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the folder of every claim: as in the run so far, else as wanted, else one in the state folder.

    Raises:
        LocalStateError: a folder is not there, a claim is not in use, or the run has begun with other folders.
        OSError: the state folder cannot be written.
    """
    claims = claims_of(job)
    given = {claim: str(Path(folder).absolute()) for claim, folder in wanted.items()}
    for claim, folder in given.items():
        if claim not in claims:
            named = ", ".join(claims) or "none"
            raise LocalStateError(f"--volume {claim}={folder}: the job uses no claim {claim!r}; it uses: {named}")
        if not Path(folder).is_dir():
            raise LocalStateError(f"--volume {claim}={folder}: there is no such folder; make it, or correct the path")
    kept = records.volumes()
    if kept is not None:
        for claim, folder in given.items():
            if kept.get(claim) != folder:
                raise LocalStateError(
                    f"--volume {claim}={folder}: this run has begun with {kept.get(claim)}; leave the option out, "
                    "or start anew with --fresh"
                )
        return kept
    volumes = {claim: given.get(claim) or _own_folder(records, claim) for claim in claims}
    records.save_volumes(volumes)
    return volumes


def store_folder(job: LLMTrainJob, volumes: Mapping[str, str]) -> Path | None:
    """Return where the job's checkpoints and metrics lie on this machine; None where they lie elsewhere (s3)."""
    uri = Uri.parse(job.spec.checkpoint.store)
    return None if uri.scheme == "s3" else Path(uri.local_path(volumes))


def _own_folder(records: Records, claim: str) -> str:
    folder = (records.folder / "volumes" / claim).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
