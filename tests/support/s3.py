"""A real S3 server for tests: versitygw, built from its Go module, over a folder whose files are the objects."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from llmtrain_kind.programs import ensure
from tests.support.ports import free_port

ACCESS, SECRET = "llmtrain-tests", "not-a-secret-of-anybody"
BUCKET = "bucket"
START_SECONDS = 30.0


class S3Server:
    """One server; killed and started again it serves the same folder at the same port."""

    def __init__(self, folder: Path) -> None:
        self._program = ensure(("versitygw",)) / "versitygw"
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.bucket = folder / "buckets" / BUCKET
        """Where objects lie: BUCKET/KEY is the file KEY below it."""
        self.bucket.mkdir(parents=True)
        (folder / "attributes").mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """What a worker finds in its environment."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        owner = ["--access", ACCESS, "--secret", SECRET, "--port", f"127.0.0.1:{self._port}", "--quiet"]
        backend = ["posix", "--sidecar", str(self._folder / "attributes"), str(self._folder / "buckets")]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._program), *owner, *backend], stdout=log, stderr=log, env={**os.environ, "HOME": "/tmp"}
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((self._folder / "server.log").read_text(errors="replace")) from None
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
