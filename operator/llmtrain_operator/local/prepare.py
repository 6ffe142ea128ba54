"""Before a local run: become the controller of its folder, and take up what an earlier run left there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain_api.job import LLMTrainJob
from llmtrain_operator.local.processes import kill_agents
from llmtrain_operator.local.records import LocalStateError, Records
from llmtrain_operator.local.volumes import settle_volumes, store_folder


@dataclass(frozen=True)
class LocalRun:
    """What to run and where."""

    manifest: dict[str, Any]
    state: Path
    volumes: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False
    """Forget an earlier run of this name first (its checkpoints stay)."""


@dataclass(frozen=True)
class Prepared:
    """A folder that is ours, with a job in it."""

    records: Records
    manifest: dict[str, Any]
    volumes: dict[str, str]


def prepare(run: LocalRun) -> Prepared:
    """Become the controller of this job: take up an earlier run of the same manifest, or begin one.

    Raises:
        LocalStateError: a folder cannot be used, or the state folder holds a run of this name with another spec.
    """
    metadata = run.manifest["metadata"]
    records = Records(run.state, metadata.get("namespace", "default"), metadata["name"])
    records.acquire()
    try:
        return _take_up(run, records)
    except OSError as error:
        records.release()
        raise records.unwritable(error) from error
    except BaseException:
        records.release()
        raise


def _take_up(run: LocalRun, records: Records) -> Prepared:
    if run.fresh or not records.has_job():
        kill_agents(records.workers_folder)
        records.forget_job()
    known = records.load_job()
    if known is not None:
        _refuse_other_spec(records, known["spec"], run.manifest["spec"])
    job = LLMTrainJob.parse(known or run.manifest)
    volumes = settle_volumes(records, job, run.volumes)
    if (store := store_folder(job, volumes)) is not None:
        records.lock_store(store)
    if known is None:
        known = records.new_job({**run.manifest, "metadata": {"namespace": "default", **run.manifest["metadata"]}})
    return Prepared(records, known, volumes)


def _refuse_other_spec(records: Records, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    for path, before, now in differences(known, wanted, "spec"):
        raise LocalStateError(
            f"{path}: {now} now, but {before} in the run that {records.folder} holds; a run keeps its spec: give the "
            "job another name, or start anew with --fresh (checkpoints stay)"
        )


def differences(before: Any, now: Any, path: str) -> list[tuple[str, str, str]]:
    """Return (path, before, now) of each place in which two manifests differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        nested = [differences(before.get(key), now.get(key), f"{path}.{key}") for key in keys]
        return [difference for found in nested for difference in found]
    if before == now:
        return []
    return [(path, _shown(before), _shown(now))]


def _shown(value: Any) -> str:
    return "left out" if value is None else repr(value)
