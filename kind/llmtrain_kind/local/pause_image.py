"""The image of a pod's sandbox: our own pause program and nothing else, written as an OCI archive."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

from llmtrain_kind.local.layout import PAUSE_IMAGE

_MEDIA = "application/vnd.oci.image"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write(program: Path, archive: Path, name: str = PAUSE_IMAGE) -> None:
    """Write an OCI archive (image layout in a tar, opencontainers/image-spec) that holds ``program`` as /pause."""
    layer = _tar({"pause": program.read_bytes()}, mode=0o755)
    config = _json(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"User": "65535:65535", "Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _descriptor("config.v1+json", config),
            "layers": [_descriptor("layer.v1.tar", layer)],
        }
    )
    entry = _descriptor("manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": name}
    blobs = {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in (layer, config, manifest)}
    index = _json({"schemaVersion": 2, "manifests": [entry]})
    archive.write_bytes(_tar({"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": index, **blobs}))


def _tar(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))
    return output.getvalue()


def _descriptor(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _json(content: object) -> bytes:
    return json.dumps(content).encode()
