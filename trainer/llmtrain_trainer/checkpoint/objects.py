"""A store behind an S3 address (base.py: what is in it), by fsspec and s3fs, which read AWS's usual environment.

An object appears whole or not at all, and none can be renamed: shards are put where they stay, below a name that has
the number of the attempt's claim, so that no two attempts ever put the same key. The manifest, put last, is the commit.
Each rank puts its checkpoint together in its own folder first (the spool), and reads from there, what it fetched.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError, NoCredentialsError
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from llmtrain_api.uris import Uri
from llmtrain_trainer.checkpoint import claims
from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint import state as states
from llmtrain_trainer.checkpoint.base import COMMITTED_NAME, MARKER, METRICS, OUR_FILES, OWNER, Store, name_of
from llmtrain_trainer.checkpoint.claims import Claim
from llmtrain_trainer.checkpoint.manifest import BadCheckpoint, FileEntry, Manifest
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import CheckpointError

CONNECTION = {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 2, "mode": "standard"}}
"""Of botocore, in seconds; s3fs tries five times on top. All of it is well within writer.SAVE_TIMEOUT."""
CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


class _NoCredentialsError(OSError):
    """None were found: a mistake at the start; later the cloud, which gives them, may be away."""


class _WrongChecksumError(OSError):
    """The server sent other bytes than it noted when they were put."""


@dataclass(frozen=True, order=True)
class _Form:
    """What one claim has put of one step; number 0: put before there were claims."""

    step: int
    number: int

    @property
    def folder(self) -> str:
        return name_of(self.step) + (f".attempt-{self.number}" if self.number else "")


class ObjectStore(Store):
    """One rank's hand on the objects below the address; rank 0 makes and removes checkpoints."""

    def __init__(self, uri: Uri, config: RunConfig) -> None:
        launch = config.launch
        super().__init__(
            config.spec.checkpoint.store, run_id=launch.run_id, attempt=launch.attempt, job_uid=launch.job_uid
        )
        self._root = uri.path.strip("/")
        self._secret = config.spec.checkpoint.secret_name
        self.metrics_folder = config.work_dir / f"s3-{hashlib.sha256(self._root.encode()).hexdigest()[:16]}"
        self._spool = self.metrics_folder / f"rank-{launch.global_rank}"
        shutil.rmtree(self._spool, ignore_errors=True)
        self._spool.mkdir(parents=True)
        self._remote = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs=CONNECTION)

    def claim(self) -> str:
        try:
            with _plain_errors():
                content = self._create_owner()
                self._check_owner(content)
                self._bring_metrics()
            return content
        except _NoCredentialsError as error:
            raise self._no_credentials() from error
        except PermissionError as error:
            raise self._wrong(
                f"the server refuses: {error}",
                allowed="an address that these credentials may list, read, write and delete",
                fix=f"give them the right to, or correct {CREDENTIALS} in the Secret of checkpoint.secretName "
                f"({self._secret or 'none is named'})",
            ) from error
        except FileNotFoundError as error:
            raise self._wrong(
                f"there is no bucket {self._root.partition('/')[0]!r}",
                allowed="s3://BUCKET/PATH of a bucket that exists",
                fix="make the bucket, or correct the address, or AWS_ENDPOINT_URL if the bucket is on another server",
            ) from error
        except OSError as error:
            raise CheckpointError(f"spec.checkpoint.store {self._uri} cannot be reached: {error}") from error

    def expect(self, owner: str) -> None:
        try:
            with _plain_errors():
                seen = self._remote.cat_file(self._key(OWNER)).decode()
        except _NoCredentialsError as error:
            raise self._no_credentials() from error
        except FileNotFoundError:
            seen = ""
        except OSError as error:
            raise CheckpointError(f"spec.checkpoint.store {self._uri} cannot be reached: {error}") from error
        if seen != owner:
            raise self._wrong(
                "this worker does not see the store that worker 0 sees",
                allowed="one server for all workers",
                fix="give all workers the same AWS_ENDPOINT_URL",
            )

    def steps(self) -> list[int]:
        return sorted({form.step for form, names in self._listed().items() if manifests.NAME in names})

    def good(self, step: int) -> Manifest:
        problem = BadCheckpoint("no manifest: it was never committed")
        for form in self._forms(step):
            try:
                return self._verified(form)
            except BadCheckpoint as error:
                problem = error
        raise problem

    def _forms(self, step: int) -> list[_Form]:
        """Return what was committed of a step, that of the newest claim first."""
        listed = self._listed().items()
        return sorted((f for f, names in listed if f.step == step and manifests.NAME in names), reverse=True)

    def _verified(self, form: _Form) -> Manifest:
        manifest = self._manifest(form)
        check = functools.partial(self._problem, form)
        manifests.check(manifest, run_id=self._run_id, step=form.step, problem_of=check)
        return manifest

    def _manifest(self, form: _Form) -> Manifest:
        try:
            with _plain_errors():
                content = self._remote.cat_file(self._key(form.folder, manifests.NAME))
        except FileNotFoundError:
            raise BadCheckpoint("no manifest: it was never committed") from None
        except _WrongChecksumError as error:
            raise BadCheckpoint("the manifest is damaged (checksum of the server)") from error
        return manifests.parse(content)

    def _form_of(self, manifest: Manifest) -> _Form:
        for form in self._forms(manifest.step):
            with contextlib.suppress(BadCheckpoint):
                if self._manifest(form) == manifest:
                    return form
        raise CheckpointError(f"{self._uri}/{name_of(manifest.step)} is gone, which verified a moment ago")

    def read(self, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        folder = self._spool / "read"
        folder.mkdir(exist_ok=True)
        try:
            form = self._form_of(manifest)
            states.read(
                folder, tensors, _FetchingReader(folder, lambda n: self._fetch(form, manifest.files[n], folder / n))
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def staging_path(self, step: int) -> Path:
        return self._spool / name_of(step)

    def where(self, step: int) -> str:
        way = f"by way of {self._spool.parent}, which needs room for the shards of the worker's ranks"
        return f"{self._uri}/{self._own(step).folder} ({way})"

    def room_for(self, snapshot: Mapping[str, Tensor]) -> None:
        """Nobody knows it: a bucket has no end, and which ranks write what they hold alike is torch's choice."""

    def begin(self, step: int) -> Path:
        self.check_current()
        path = self.staging_path(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        mark = {"runId": self._run_id, "step": step, "attempt": self._attempt, "claim": self._number}
        (path / MARKER).write_text(json.dumps(mark), encoding="utf-8")
        return path

    def publish(self, step: int, names: list[str]) -> None:
        path = self.staging_path(step)
        with _plain_errors():
            for name in names:
                self._remote.put_file(str(path / name), self._key(self._own(step).folder, name))
        self.discard(step)

    def discard(self, step: int) -> None:
        shutil.rmtree(self.staging_path(step), ignore_errors=True)

    def commit(self, manifest: Manifest) -> None:
        self.check_current()  # for the lines, too
        own = self._own(manifest.step)
        folder = own.folder
        with _plain_errors():
            there = self._remote.find(self._key(folder), detail=True, withdirs=False)
            sizes = {key.rsplit("/", 1)[-1]: int(info["size"]) for key, info in there.items()}
            missing = [name for name, entry in manifest.files.items() if sizes.get(name) != entry.bytes]
            if missing:
                raise CheckpointError(f"{', '.join(missing[:3])} not in {self._uri}/{folder}: do all workers share it?")
            lines = self.metrics_folder / METRICS
            if lines.exists():  # before the commit: who goes on from the checkpoint finds those that lead up to it
                self._remote.put_file(str(lines), self._key(METRICS))
            self.check_current()
            self._remote.pipe_file(self._key(folder, manifests.NAME), manifest.to_bytes())
            listed = self._listed()
            for form in [form for form in listed if form.step == own.step and form.number < own.number]:
                self._delete(form, listed[form])  # it did not verify when this attempt started

    def abandon(self, step: int) -> None:
        with contextlib.suppress(OSError), _plain_errors():
            names = self._listed().get(self._own(step), set())
            if manifests.NAME not in names:
                self._delete(self._own(step), names)

    def remove(self, step: int) -> None:
        with _plain_errors():
            listed = self._listed()
            for form in sorted(form for form in listed if form.step == step):
                self._delete(form, listed[form])

    def unfinished(self) -> list[str]:
        return [form.folder for form, names in sorted(self._listed().items()) if manifests.NAME not in names]

    def clear_unfinished(self) -> None:
        self.check_current()
        for form, names in self._listed().items():
            if manifests.NAME not in names and form.number <= self._number:
                with contextlib.suppress(OSError), _plain_errors():
                    self._delete(form, names)
        with contextlib.suppress(OSError), _plain_errors():  # some servers cannot list them
            self._abort_uploads()

    def _key(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _create_owner(self) -> str:
        content = json.dumps({"runId": self._run_id, "id": uuid.uuid4().hex, "createdAt": time.time()})
        key = self._key(OWNER)
        if not self._remote.exists(key):
            with contextlib.suppress(FileExistsError):  # another run was quicker: only one of the two wins
                self._remote.pipe_file(key, content.encode(), mode="create")
        return str(self._remote.cat_file(key).decode())

    def _claim_numbers(self) -> list[int]:
        with _plain_errors():
            keys = self._remote.find(self._key(claims.FOLDER))
        return claims.numbers_of(str(key).rsplit("/", 1)[-1] for key in keys)

    def _read_claim(self, number: int) -> bytes:
        try:
            with _plain_errors():
                return bytes(self._remote.cat_file(self._key(claims.FOLDER, claims.name_of(number))))
        except FileNotFoundError:
            return b""

    def _create_claim(self, claim: Claim) -> bool:
        """Put it on condition that there is none; where a server knows no conditions, whoever is read back has won.

        There two starts in the same moment may both believe it, if one reads before the other writes. Both would have
        to be of different attempts, which the operator starts one after the other.
        """
        key, content = self._key(claims.FOLDER, claims.name_of(claim.number)), claim.to_bytes()
        try:
            with _plain_errors():
                self._remote.pipe_file(key, content, mode="create")
        except OSError as error:
            if isinstance(error, FileExistsError) or error.errno == errno.EBUSY:  # 409: another puts it right now
                return False
            if error.errno == errno.EINVAL and self._remote.exists(key):  # 412 that names no condition
                return False
            if error.errno != errno.ENOSYS:  # NotImplemented: the condition, not the put
                raise
            with _plain_errors():
                if self._remote.exists(key):
                    return False
                self._remote.pipe_file(key, content)
        return self._read_claim(claim.number) == content  # a server may also have passed over the condition

    def _forget_claims(self, numbers: list[int]) -> None:
        with contextlib.suppress(OSError), _plain_errors():
            for number in numbers:
                self._remote.rm_file(self._key(claims.FOLDER, claims.name_of(number)))

    def _bring_metrics(self) -> None:
        """Take over the lines of earlier attempts, unless this worker holds more of them."""
        own = self.metrics_folder / METRICS
        with contextlib.suppress(FileNotFoundError):
            if not own.exists() or own.stat().st_size < int(self._remote.info(self._key(METRICS))["size"]):
                self._remote.get_file(self._key(METRICS), str(own))

    def _own(self, step: int) -> _Form:
        return _Form(step, self._number)

    def _listed(self) -> dict[_Form, set[str]]:
        """Return the names of our files by what they are of."""
        with _plain_errors():
            keys = self._remote.find(self._root)
        found: dict[_Form, set[str]] = {}
        for key in keys:
            folder, _, name = str(key).removeprefix(f"{self._root}/").rpartition("/")
            match = COMMITTED_NAME.fullmatch(folder)
            form = _Form(int(match[1]), int(match[2] or 0)) if match else None
            if form and folder == form.folder and OUR_FILES.fullmatch(name):
                found.setdefault(form, set()).add(name)
        return found

    def _delete(self, form: _Form, names: set[str]) -> None:
        if form.number > self._number:
            self.check_current()
        if manifests.NAME in names:
            self._remote.rm_file(self._key(form.folder, manifests.NAME))
        rest = [self._key(form.folder, name) for name in sorted(names - {manifests.NAME})]
        if rest:
            self._remote.rm(rest)

    def _abort_uploads(self) -> None:
        """Give back what a killed attempt had uploaded of large files: no listing shows it, but it takes room."""
        bucket, _, prefix = self._root.partition("/")
        found = self._remote.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/step-")
        for upload in found.get("Uploads", ()):
            self._remote.call_s3(
                "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )

    def _problem(self, form: _Form, name: str, entry: FileEntry) -> str:
        """Return what is wrong with an object, of which every byte is read."""
        digest = hashlib.sha256()
        try:
            with _plain_errors(), self._remote.open(self._key(form.folder, name), "rb", cache_type="none") as file:
                if file.size != entry.bytes:  # of a wrong size, nothing is read
                    return manifests.difference(name, entry, file.size, "")
                while chunk := file.read(manifests.CHUNK_BYTES):
                    digest.update(chunk)
        except FileNotFoundError:
            return f"{name} is missing"
        except _WrongChecksumError:
            return f"{name} has other content than was written (checksum of the server)"
        return manifests.difference(name, entry, entry.bytes, digest.hexdigest())

    def _fetch(self, form: _Form, entry: FileEntry, path: Path) -> None:
        if path.exists():
            return
        try:
            with _plain_errors():
                self._remote.get_file(self._key(form.folder, path.name), str(path))
        except OSError as error:
            raise CheckpointError(f"{self._uri}/{form.folder}/{path.name} cannot be read: {error}") from error
        if problem := manifests.problem(path, entry):
            raise CheckpointError(f"{self._uri}/{form.folder}: {problem}")

    def _no_credentials(self) -> Exception:
        return self._wrong(
            "no credentials were found for it",
            allowed=f"an address whose credentials the workers have: {CREDENTIALS}, or an identity of the cloud",
            fix=f"name in checkpoint.secretName a Secret with {CREDENTIALS} (locally: set them in the environment)",
        )


class _FetchingReader(FileSystemReader):
    """Reads a checkpoint from a folder into which each file comes when it is needed."""

    def __init__(self, folder: Path, fetch: Callable[[str], None]) -> None:
        super().__init__(folder)
        self._fetch = fetch

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self._fetch(".metadata")
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: Any, planner: Any) -> Any:
        names = sorted({self.storage_data[item.storage_index].relative_path for item in plan.items})
        with ThreadPoolExecutor(manifests.VERIFY_THREADS) as pool:
            list(pool.map(self._fetch, names))
        return super().read_data(plan, planner)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Let all that the libraries raise come as OSError, in one line."""
    try:
        yield
    except NoCredentialsError as error:
        raise _NoCredentialsError(str(error)) from error
    except FlexibleChecksumError as error:
        raise _WrongChecksumError(str(error)) from error
    except (BotoCoreError, ClientError, aiohttp.ClientError) as error:
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}") from error
