"""The read-only tree of what the trainer's archive leaves out: torch and the packages that come only with it."""

from __future__ import annotations

from pathlib import Path

from llmtrain_kind.folders import cache_folder
from llmtrain_kind.images_chroot import compile_bytecode
from llmtrain_kind.images_layers import RECIPE, install_pins, pinned
from llmtrain_kind.images_oci import Layer
from llmtrain_kind.images_spec import BuildSpec, ImageError, ImageSpec, Progress
from llmtrain_kind.images_tools import cached, key_of, locked_cache


def mounted_tree(spec: BuildSpec, image: ImageSpec, base: Layer, progress: Progress) -> Path:
    """The host's folder to mount at `image.mount_path`, made on first use (about a minute; 5 GB, hard-linked).

    One folder per set of exact versions, never changed once it is there, and never removed here: a running cluster
    may have it mounted. A person may delete old ones.
    """
    pins = pinned(spec, image, progress)[1]
    versions = dict(pin.split("==", 1) for pin in pins)
    first = image.mounted[0]
    if first not in versions:
        raise ImageError(f"images.toml: {image.name}.mounted names {first!r}, which the extra {image.extra!r} lacks")
    folder = cache_folder() / first

    def fill(tree: Path) -> None:
        progress(f"{image.name}: {first} {versions[first]} for mounting ({len(pins)} packages, some minutes when cold)")
        install_pins(spec, pins, tree, progress)
        compile_bytecode(base.root, tree, image.mount_path or "", strict=False)

    with locked_cache(folder, progress):
        return cached(folder, f"{versions[first]}-{key_of(RECIPE, pins, spec.python)}", fill)
