"""What a local run keeps on disk, so that a controller that was killed finds its job and its workers again.

ROOT/NAMESPACE.NAME/
    job.json         manifest with uid and status, replaced atomically
    volumes.json     claim to folder, as this run uses them
    key              operator key, from which the job's token is made
    port             of the coordinator: agents dial it again after a restart
    lock             held by the controller that is alive
    workers/NAME/    worker.json (pid, start time), token, log, work/ (sockets, error files)
    volumes/CLAIM/   what pvc://CLAIM means, unless --volume says otherwise
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from llmtrain_api.job import LLMTrainJob


class LocalStateError(Exception):
    """The folder cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class WorkerRecord:
    """A worker that was started: enough to recognise its process again, also after its pid was given away."""

    name: str
    index: int
    attempt: int
    replicas: int
    pid: int
    process_start: int
    """Start time of the process in clock ticks after boot (field 22 of /proc/PID/stat)."""
    created_at: float
    coordinator_url: str
    """The address that its agent dials for as long as it lives."""


_VOLUMES = TypeAdapter(dict[str, str])
_WORKER = TypeAdapter(WorkerRecord)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file so that a reader, or a restart after a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class Records:
    """The folder of one local job."""

    def __init__(self, root: Path, namespace: str, name: str) -> None:
        """Name the folder; nothing is made yet.

        Raises:
            LocalStateError: no job has such a name, and the folder would not lie below `root`.
        """
        for field, value in (("namespace", namespace), ("name", name)):
            if "/" in value or value in ("", ".", ".."):
                raise LocalStateError(f"metadata.{field}: {value!r} is no name; allowed: a-z, 0-9 and '-'")
        self.folder = root / f"{namespace}.{name}"
        self.workers_folder = self.folder / "workers"
        self._lock: IO[str] | None = None
        self._store_lock: int | None = None

    def acquire(self) -> None:
        """Make the folder and become its only controller.

        Raises:
            LocalStateError: the folder cannot be written, or another controller holds it.
        """
        try:
            self.workers_folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "a+")  # noqa: SIM115 (held for the life of the process)
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise LocalStateError(
                f"--state {self.folder.parent}: another `llmtrain run --local` controls {self.folder.name} now; "
                "stop it first, or use another --state"
            ) from error

    def lock_store(self, store: Path) -> None:
        """Keep out a run of the same name that another state folder holds: to the trainer it would be the same run.

        Raises:
            LocalStateError: there is one.
        """
        try:
            store.mkdir(parents=True, exist_ok=True)
            self._store_lock = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._store_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LocalStateError(
                f"spec.checkpoint.store: {store} is in use by another `llmtrain run --local`; one folder belongs to "
                "one run: stop the other, or use another folder"
            ) from error
        except OSError:
            pass  # the trainer says what is wrong with the folder, and how to mend it

    def release(self) -> None:
        """Let another controller have the folder."""
        if self._lock:
            self._lock.close()
            self._lock = None
        if self._store_lock is not None:
            os.close(self._store_lock)
            self._store_lock = None

    def unwritable(self, error: OSError) -> LocalStateError:
        """Return what to tell the user after this error."""
        return LocalStateError(
            f"--state {self.folder.parent}: {error.filename or self.folder}: {error.strerror}; "
            "use a folder that you can write, on a disk with space left"
        )

    # --- the job

    def has_job(self) -> bool:
        return (self.folder / "job.json").exists()

    def load_job(self) -> dict[str, Any] | None:
        """Return the job with its status, or None where there is none.

        Raises:
            LocalStateError: the file cannot be read or holds no job.
        """
        path = self.folder / "job.json"
        try:
            job: dict[str, Any] = json.loads(path.read_text())
            LLMTrainJob.parse(job)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalStateError(f"{path}: {error.strerror}; make it readable, or use another --state") from error
        except (ValueError, TypeError, RecursionError) as error:
            what = str(error).splitlines()[0]
            if isinstance(error, ValidationError):  # whose first line names no field
                wrong = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()[:3]]
                what = "; ".join(f"{field}: {message}" for field, message in wrong)
            raise LocalStateError(
                f"{path} is damaged ({what}); restore it, or start anew with --fresh (checkpoints stay)"
            ) from error
        return job

    def save_job(self, job: dict[str, Any]) -> None:
        """Make the job durable. May raise OSError."""
        write_atomically(self.folder / "job.json", json.dumps(job, indent=1) + "\n")

    def new_job(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Give a manifest what an API server would give it, and keep it. May raise OSError."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metadata = {**manifest["metadata"], "uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": now}
        job = {**manifest, "metadata": metadata, "status": {}}
        self.save_job(job)
        return job

    def forget_job(self) -> None:
        """Forget job and workers, so that the next run is a new one. Volumes, and so checkpoints, stay."""
        for name in ("job.json", "volumes.json"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.workers_folder, ignore_errors=True)
        self.workers_folder.mkdir(parents=True, exist_ok=True)

    # --- what the run was given once

    def key(self) -> bytes:
        """Return the operator key of this folder; made at the first call."""
        path = self.folder / "key"
        if not path.exists():
            write_atomically(path, secrets.token_hex(32), 0o600)
        return path.read_text().strip().encode()

    def port(self) -> int | None:
        """Return the coordinator's last port, where there is one."""
        try:
            return int((self.folder / "port").read_text())
        except (OSError, ValueError):
            return None

    def save_port(self, port: int) -> None:
        """Make the port durable. May raise OSError."""
        write_atomically(self.folder / "port", f"{port}\n")

    def volumes(self) -> dict[str, str] | None:
        """Return claim to folder as this run uses them; None where nothing was kept."""
        try:
            return _VOLUMES.validate_json((self.folder / "volumes.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def save_volumes(self, volumes: dict[str, str]) -> None:
        """Make them durable. May raise OSError."""
        write_atomically(self.folder / "volumes.json", json.dumps(volumes, indent=1) + "\n")

    # --- workers

    def worker_folder(self, name: str) -> Path:
        return self.workers_folder / name

    def save_worker(self, record: WorkerRecord) -> None:
        """Make the record durable. May raise OSError."""
        write_atomically(self.worker_folder(record.name) / "worker.json", json.dumps(asdict(record)))

    def load_workers(self) -> list[WorkerRecord]:
        """Return the workers that were started. One whose record is damaged counts as never started."""
        found = []
        for path in sorted(self.workers_folder.glob("*/worker.json")):
            try:
                found.append(_WORKER.validate_json(path.read_bytes()))
            except (OSError, ValidationError):
                path.unlink(missing_ok=True)
        return found

    def forget_worker(self, name: str) -> None:
        """Forget a worker that is gone; its log stays beside the others."""
        folder = self.worker_folder(name)
        (folder / "worker.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "work", ignore_errors=True)
