"""Builds the container images as OCI archives, without Docker or any other daemon.

    base (Debian, Python) <- dependencies of the image <- our code <- (trainer) what to import while warming up

Each layer is cached by its content.

torch is not in them: `mounts()` names a folder of the host that the nodes' runtime mounts into every container.
"""

from __future__ import annotations

import time
from pathlib import Path

from llmtrain_kind.errors import ClusterError
from llmtrain_kind.images_chroot import run_in_image
from llmtrain_kind.images_layers import base_layer, code_layer, dependency_layer
from llmtrain_kind.images_oci import EPOCH_TEXT, ImageConfig, Layer, write_archive
from llmtrain_kind.images_spec import BuildSpec, ImageError, ImageSpec, Progress, load_spec
from llmtrain_kind.images_tools import locked_cache, need_root, prune
from llmtrain_kind.images_torch import mounted_tree
from llmtrain_kind.images_warm import warm_layer

__all__ = ["ImageError", "build_images", "check_images", "image_names", "mounts"]

# Enough to switch between a few branches; a code layer is small, but they come with every edit.
KEPT_LAYERS = 6
TRACEBACK_LINES = 8

# Runs in the image. A `__main__` module would start its program.
IMPORT_ALL = """
import importlib, importlib.metadata, pkgutil, sys
ours = [name for name in sys.argv[1:] if name.startswith("llmtrain_")]
names = list(sys.argv[1:])
for package in ours:
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    names += [module.name for module in found if not module.name.endswith(".__main__")]
for name in names:
    importlib.import_module(name)
scripts = importlib.metadata.distribution("llmtrain").entry_points
for script in scripts:
    script.load()
print(f"{len(names)} modules and {len(scripts)} console scripts load")
"""


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
        for prefix in (
            "wheel",
            "pins",
            *(f"{kind}-{name}" for kind in ("code", "deps", "warm") for name in spec.images),
        ):
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
    """Runs each image's Python as a restricted pod would and imports every module of ours and every console script.

    So a dependency that only the developer's environment has is found here. Raises ImageError with the traceback's end.
    """
    spec = load_spec(repo_root)
    build_images(repo_root, progress, only)
    for image in _chosen(spec, only):
        started = time.monotonic()
        with locked_cache(spec.cache, progress):
            layers = _layers(spec, image, progress)
        host = mounts(repo_root, progress) if image.mount_path else []
        environment = [f"{key}={value}" for key, value in spec.env.items()]
        argv = ["env", "-i", *environment, "python3", "-c", IMPORT_ALL, *image.packages, *image.mounted]
        try:
            found = run_in_image(layers, spec.uid, host, argv).strip()
        except ClusterError as error:
            traceback = "\n".join(str(error).splitlines()[-TRACEBACK_LINES:])
            raise ImageError(f"image {image.name}: its code does not load in it:\n{traceback}") from None
        progress(f"{image.name}: {found} as uid {spec.uid}, read-only, {time.monotonic() - started:.1f} s")


def image_names(spec: BuildSpec, image: ImageSpec) -> list[str]:
    """The names that the archive gives to the image: `:dev` for manifests of ours, and the project's version."""
    return [f"{spec.repository}-{image.name}:{tag}" for tag in ("dev", spec.version)]


def _chosen(spec: BuildSpec, only: str | None) -> list[ImageSpec]:
    if only is not None and only not in spec.images:
        raise ImageError(f"no image {only!r}; there are: {', '.join(spec.images)}")
    return [image for image in spec.images.values() if only in (None, image.name)]


def _layers(spec: BuildSpec, image: ImageSpec, progress: Progress) -> list[Layer]:
    base = base_layer(spec, progress)
    layers = [base, dependency_layer(spec, image, base, progress), code_layer(spec, image, base, progress)]
    if image.mount_path:
        tree = mounted_tree(spec, image, base, progress)
        layers.append(warm_layer(spec, image, layers, tree, progress))
    return layers


def _config(spec: BuildSpec, image: ImageSpec) -> ImageConfig:
    labels = {
        "org.opencontainers.image.title": f"{Path(spec.repository).name}-{image.name}",
        "org.opencontainers.image.description": image.description,
        "org.opencontainers.image.version": spec.version,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.created": EPOCH_TEXT,
    }
    return ImageConfig(f"{spec.uid}:{spec.uid}", image.entrypoint, spec.env, spec.home, labels)
