"""What a local run keeps on disk, so that a controller that was killed finds its job and its workers again.

ROOT/NAMESPACE.NAME/
    job.json         manifest with uid and status, replaced atomically
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


def process_start(pid: int) -> int | None:
    """Return when a living process started, in ticks after boot; None where it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file so that a reader, or a restart after a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Records:
    """The folder of one local job."""

    def __init__(self, root: Path, namespace: str, name: str) -> None:
        self.folder = root / f"{namespace}.{name}"
        self.workers_folder = self.folder / "workers"
        self._lock: IO[str] | None = None

    def acquire(self) -> None:
        """Make the folder and become its only controller.

        Raises:
            LocalStateError: the folder cannot be written, or another controller holds it.
        """
        try:
            self.workers_folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "a+")  # noqa: SIM115 (held for the life of the process)
        except OSError as error:
            raise LocalStateError(
                f"--state {self.folder.parent}: {error.strerror}; choose a folder you can write"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise LocalStateError(
                f"another `llmtrain run --local` controls {self.folder.name} already; stop it, or use another --state"
            ) from error

    def release(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    # --- the job

    def load_job(self) -> dict[str, Any] | None:
        try:
            job: dict[str, Any] = json.loads((self.folder / "job.json").read_text())
        except FileNotFoundError:
            return None
        return job

    def save_job(self, job: dict[str, Any]) -> None:
        write_atomically(self.folder / "job.json", json.dumps(job, indent=1) + "\n")

    def new_job(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Give a manifest what an API server would give it, and keep it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metadata = {**manifest["metadata"], "uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": now}
        job = {**manifest, "metadata": metadata, "status": {}}
        self.save_job(job)
        return job

    def forget_job(self) -> None:
        """Forget job and workers, so that the next run is a new one. Volumes, and so checkpoints, stay."""
        (self.folder / "job.json").unlink(missing_ok=True)
        shutil.rmtree(self.workers_folder, ignore_errors=True)
        self.workers_folder.mkdir(parents=True, exist_ok=True)

    def key(self) -> bytes:
        """Return the operator key of this folder; made at the first call."""
        path = self.folder / "key"
        if not path.exists():
            write_atomically(path, secrets.token_hex(32), 0o600)
        return path.read_text().strip().encode()

    def port(self) -> int:
        """Return the coordinator's last port, 0 for any."""
        try:
            return int((self.folder / "port").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def save_port(self, port: int) -> None:
        write_atomically(self.folder / "port", str(port))

    # --- workers

    def worker_folder(self, name: str) -> Path:
        return self.workers_folder / name

    def save_worker(self, record: WorkerRecord) -> None:
        write_atomically(self.worker_folder(record.name) / "worker.json", json.dumps(asdict(record)))

    def load_workers(self) -> list[WorkerRecord]:
        found = []
        for path in sorted(self.workers_folder.glob("*/worker.json")):
            found.append(WorkerRecord(**json.loads(path.read_text())))
        return found

    def forget_worker(self, name: str) -> None:
        """Forget a worker that is gone; its log stays beside the others."""
        folder = self.worker_folder(name)
        (folder / "worker.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "work", ignore_errors=True)
