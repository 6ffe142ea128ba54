"""Writes OCI image layouts as one tar, by the standard library alone. Format: OCI image-spec v1.1."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# All times in layers of ours and in the configuration: the digest must depend on content only.
EPOCH = 1577836800
EPOCH_TEXT = "2020-01-01T00:00:00Z"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
# Filled by the runtime; what a bootstrap leaves there (device nodes) must not be in a layer.
RUNTIME_DIRS = ("dev", "proc", "sys", "run")

Normalise = Callable[[tarfile.TarInfo], tarfile.TarInfo]


@dataclass(frozen=True)
class Layer:
    """A layer's tar file, its digest ("sha256:...") and size in bytes, and the folder that it was made from."""

    root: Path
    tar: Path
    digest: str
    size: int


@dataclass(frozen=True)
class ImageConfig:
    """The part of an OCI image configuration that we set."""

    user: str
    entrypoint: tuple[str, ...]
    env: dict[str, str]
    working_dir: str
    labels: dict[str, str]


def write_layer(root: Path, tar_path: Path, normalise: Normalise) -> Layer:
    """Packs the folder `root` as a layer: names sorted, owners as numbers, times whole seconds."""
    with tarfile.open(tar_path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in _sorted_tree(root):
            info = tar.gettarinfo(str(root / name), arcname=name)
            info.uname = info.gname = ""
            info.mtime = int(info.mtime)
            info = normalise(info)
            if info.isreg():
                with open(root / name, "rb") as source:
                    tar.addfile(info, source)
            else:
                tar.addfile(info)
    with open(tar_path, "rb") as packed:
        digest = hashlib.file_digest(packed, "sha256").hexdigest()
    return Layer(root, tar_path, f"sha256:{digest}", tar_path.stat().st_size)


def own_files(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Root's, readable by all, writable by nobody else, at EPOCH: for layers that hold our own installs."""
    info.uid = info.gid = 0
    info.mtime = EPOCH
    if not info.issym():
        info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
    return info


def keep_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owners, modes and times as they are: for the operating system, whose bytecode files record source times."""
    return info


def write_archive(out: Path, names: list[str], layers: list[Layer], config: ImageConfig) -> bool:
    """Writes `out`, an OCI layout in a tar holding one image under all `names`; False if it was there already.

    Written under a temporary name and renamed, so a reader never sees half an archive.
    """
    config_blob = _json(_config_document(layers, config))
    manifest_blob = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor(CONFIG_TYPE, config_blob),
            "layers": [{"mediaType": LAYER_TYPE, "digest": layer.digest, "size": layer.size} for layer in layers],
        }
    )
    index = [
        _descriptor(MANIFEST_TYPE, manifest_blob)
        | {
            "annotations": {
                "io.containerd.image.name": name,
                "org.opencontainers.image.ref.name": name.rpartition(":")[2],
            }
        }
        for name in names
    ]
    index_blob = _json({"schemaVersion": 2, "manifests": index})
    if _index_of(out) == index_blob:
        return False
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with tarfile.open(temporary, "w") as tar:
            _add_bytes(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            _add_bytes(tar, _blob_name(_digest(manifest_blob)), manifest_blob)
            _add_bytes(tar, _blob_name(_digest(config_blob)), config_blob)
            for layer in layers:
                info = tarfile.TarInfo(_blob_name(layer.digest))
                info.size, info.mtime = layer.size, EPOCH
                with open(layer.tar, "rb") as source:
                    tar.addfile(info, source)
            # Last, so that an archive cut short has no index and is written again.
            _add_bytes(tar, "index.json", index_blob)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _sorted_tree(root: Path) -> list[str]:
    names: list[str] = []
    for folder, dirs, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else relative + "/"
        if prefix.rstrip("/") in RUNTIME_DIRS:
            dirs.clear()
            continue
        names += [prefix + name for name in dirs + files]
    return sorted(names)


def _config_document(layers: list[Layer], config: ImageConfig) -> dict[str, object]:
    return {
        "created": EPOCH_TEXT,
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {
            "User": config.user,
            "Env": [f"{key}={value}" for key, value in config.env.items()],
            "Entrypoint": list(config.entrypoint),
            "WorkingDir": config.working_dir,
            "Labels": config.labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
    }


def _index_of(archive: Path) -> bytes | None:
    """The index of an archive made by write_archive, or None if there is none that can be read."""
    try:
        with tarfile.open(archive) as tar:
            for info in tar:
                if info.name == "index.json":
                    source = tar.extractfile(info)
                    return source.read() if source else None
    except (OSError, tarfile.TarError):
        return None
    return None


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), EPOCH
    tar.addfile(info, io.BytesIO(data))
