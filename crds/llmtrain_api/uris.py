"""Addresses of data and checkpoints: pvc://CLAIM/PATH, file:///PATH, s3://BUCKET/PATH, builtin://NAME."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from llmtrain_api.constants import VOLUME_ROOT

_CLAIM = r"pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/[^\s]*)?"
_FILE = r"file:///[^\s/][^\s]*"
_S3 = r"s3://[a-z0-9][-a-z0-9.]{1,61}[a-z0-9](/[^\s/]+)+/?"
FOLDER_PATTERN = rf"^({_CLAIM}|{_FILE})$"
STORE_PATTERN = rf"^({_CLAIM}|{_FILE}|{_S3})$"
SOURCE_PATTERN = rf"^({_CLAIM}|{_FILE}|builtin://python-stdlib)$"


@dataclass(frozen=True)
class Uri:
    """One address, taken apart."""

    scheme: str
    claim: str
    path: str
    """Below the claim, or absolute for file, or BUCKET/PATH for s3, or the name for builtin."""

    @classmethod
    def parse(cls, text: str) -> Uri:
        """Take an address apart.

        Raises:
            ValueError: the scheme is unknown, the claim is missing, or the path leaves its folder by '..'.
        """
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in ("pvc", "file", "s3", "builtin"):
            raise ValueError(
                f"{text!r} is no address: use pvc://CLAIM/PATH, file:///PATH, s3://BUCKET/PATH or builtin://NAME"
            )
        if ".." in PurePosixPath(rest).parts:
            raise ValueError(f"{text!r} must not contain '..'")
        if scheme == "pvc":
            claim, _, path = rest.partition("/")
            if not claim:
                raise ValueError(f"{text!r} names no claim: use pvc://CLAIM/PATH")
            return cls(scheme, claim, path.strip("/"))
        if scheme == "file" and not rest.startswith("/"):
            raise ValueError(f"{text!r} needs an absolute path: use file:///PATH")
        return cls(scheme, "", rest)

    def local_path(self, volumes: Mapping[str, str]) -> str:
        """Return the path inside a worker. `volumes` maps claims to folders; others lie at VOLUME_ROOT/CLAIM."""
        if self.scheme in ("builtin", "s3"):
            raise ValueError(f"{self.scheme}://{self.path} has no path")
        if self.scheme == "file":
            return self.path
        root = volumes.get(self.claim, f"{VOLUME_ROOT}/{self.claim}")
        return f"{root}/{self.path}" if self.path else root
