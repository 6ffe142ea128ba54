"""Builds the container images as OCI archives, without Docker or any other daemon.

    base (Debian, Python) <- dependencies of the image <- our code         three layers, each cached by its content

torch is not in them: `mounts()` names a folder of the host that the nodes' runtime mounts into every container.
"""

from __future__ import annotations

import time
from pathlib import Path

from llmtrain_kind.images_chroot import run_in_image
from llmtrain_kind.images_layers import base_layer, code_layer, dependency_layer
from llmtrain_kind.images_oci import EPOCH_TEXT, ImageConfig, Layer, write_archive
from llmtrain_kind.images_spec import BuildSpec, ImageError, ImageSpec, Progress, load_spec
from llmtrain_kind.images_tools import locked_cache, need_root, prune
from llmtrain_kind.images_torch import mounted_tree

__all__ = ["ImageError", "build_images", "check_images", "image_names", "mounts"]

# Enough to switch between a few branches; a code layer is small, but they come with every edit.
KEPT_LAYERS = 6


def build_images(repo_root: Path, progress: Progress = print, only: str | None = None) -> list[Path]:
    """Builds the archives of all images, or of `only` one, and returns their paths (build/images/llmtrain-NAME.tar).

    What did not change is not written again. Safe beside other builders and after a kill at any moment.
    Raises ClusterError; its kind ImageError for an unknown name.
    """
    spec = load_spec(repo_root)
    need_root()
    spec.output.mkdir(parents=True, exist_ok=True)
    archives = []
    with locked_cache(spec.cache, progress):
        for image in _chosen(spec, only):
            started = time.monotonic()
            archive = spec.output / f"{Path(spec.repository).name}-{image.name}.tar"
            layers = _layers(spec, image, progress)
            written = write_archive(archive, image_names(spec, image), layers, _config(spec, image))
            state = "built" if written else "unchanged"
            progress(f"{image.name}: {state} in {time.monotonic() - started:.1f} s")
            archives.append(archive)
        for prefix in ("wheel", "pins", *(f"{kind}-{name}" for kind in ("code", "deps") for name in spec.images)):
            prune(spec.cache, prefix, KEPT_LAYERS)
    return archives


def mounts(repo_root: Path, progress: Progress = print) -> list[tuple[Path, str]]:
    """(folder on the host, path in every container) for what the archives leave out; makes the folders if needed."""
    spec = load_spec(repo_root)
    need_root()
    with locked_cache(spec.cache, progress):
        base = base_layer(spec, progress)
        images = [image for image in spec.images.values() if image.mount_path]
        return [(mounted_tree(spec, image, base, progress), image.mount_path or "") for image in images]


def check_images(repo_root: Path, progress: Progress = print, only: str | None = None) -> None:
    """Runs each image's programs as a restricted pod would: imports of all it holds, `--help` of its entry point.

    Raises ClusterError with the program's output if one fails.
    """
    spec = load_spec(repo_root)
    build_images(repo_root, progress, only)
    for image in _chosen(spec, only):
        started = time.monotonic()
        with locked_cache(spec.cache, progress):
            layers = _layers(spec, image, progress)
        host = mounts(repo_root, progress) if image.mount_path else []
        modules = ", ".join((*image.packages, *image.mounted))
        for argv in (["python3", "-c", f"import {modules}"], [*image.entrypoint, "--help"]):
            run_in_image(layers, spec.uid, host, ["env", "-i", *(f"{k}={v}" for k, v in spec.env.items()), *argv])
        progress(f"{image.name}: works as uid {spec.uid} on a read-only root, {time.monotonic() - started:.1f} s")


def image_names(spec: BuildSpec, image: ImageSpec) -> list[str]:
    """The names that the archive gives to the image: `:dev` for manifests of ours, and the project's version."""
    return [f"{spec.repository}-{image.name}:{tag}" for tag in ("dev", spec.version)]


def _chosen(spec: BuildSpec, only: str | None) -> list[ImageSpec]:
    if only is not None and only not in spec.images:
        raise ImageError(f"no image {only!r}; there are: {', '.join(spec.images)}")
    return [image for image in spec.images.values() if only in (None, image.name)]


def _layers(spec: BuildSpec, image: ImageSpec, progress: Progress) -> list[Layer]:
    base = base_layer(spec, progress)
    return [base, dependency_layer(spec, image, base, progress), code_layer(spec, image, base, progress)]


def _config(spec: BuildSpec, image: ImageSpec) -> ImageConfig:
    labels = {
        "org.opencontainers.image.title": f"{Path(spec.repository).name}-{image.name}",
        "org.opencontainers.image.description": image.description,
        "org.opencontainers.image.version": spec.version,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.created": EPOCH_TEXT,
    }
    return ImageConfig(f"{spec.uid}:{spec.uid}", image.entrypoint, spec.env, spec.home, labels)
