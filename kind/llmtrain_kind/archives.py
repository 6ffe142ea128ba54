"""What is in an image archive: an OCI layout in a tar, or what `docker save` writes."""

import hashlib
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from llmtrain_kind.errors import Refused


@dataclass(frozen=True)
class Archive:
    """An image archive: the names of its images, and a digest of the content of all of them."""

    path: Path
    names: tuple[str, ...]
    digest: str


def read(path: Path) -> Archive:
    """Read names and digest of an archive; raises Refused when it is none."""
    try:
        with tarfile.open(path) as tar:
            # Both files name every blob by its digest, so their digest stands for the whole content.
            for index in ("index.json", "manifest.json"):
                try:
                    member = tar.extractfile(index)
                except KeyError:
                    continue
                text = member.read() if member else b""
                names = _oci_names(text) if index == "index.json" else _docker_names(text)
                if names:
                    return Archive(path, names, hashlib.sha256(text).hexdigest())
    except FileNotFoundError:
        raise Refused(f"{path}: no such image archive") from None
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path}: not an image archive ({error})") from error
    raise Refused(f"{path}: not an image archive, or one whose images have no name")


def _oci_names(text: bytes) -> tuple[str, ...]:
    annotations = [entry.get("annotations", {}) for entry in json.loads(text)["manifests"]]
    # A bare tag in the standard annotation is no full name; only containerd's own always is.
    return tuple(entry["io.containerd.image.name"] for entry in annotations if "io.containerd.image.name" in entry)


def _docker_names(text: bytes) -> tuple[str, ...]:
    tags = [tag for entry in json.loads(text) for tag in entry.get("RepoTags") or []]
    return tuple(tag if _has_registry(tag) else f"docker.io/{tag if '/' in tag else 'library/' + tag}" for tag in tags)


def _has_registry(name: str) -> bool:
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")
