"""The last layer of the trainer's image: what a fork-server must import, found out once instead of in every pod."""

from __future__ import annotations

from pathlib import Path

from llmtrain_kind.images_chroot import run_in_image
from llmtrain_kind.images_layers import RECIPE, cached_layer
from llmtrain_kind.images_oci import Layer, own_files
from llmtrain_kind.images_spec import BuildSpec, ImageSpec, Progress
from llmtrain_kind.images_tools import key_of

LEARNER = "llmtrain_trainer.warmup"
LIST = "llmtrain_trainer/warm_modules.json"


def warm_layer(spec: BuildSpec, image: ImageSpec, layers: list[Layer], tree: Path, progress: Progress) -> Layer:
    """The list of modules that one training step in this image needs, beside the package (see the learner).

    Raises ClusterError with the step's output where it fails: then no rank of this image would start either.
    """
    key = key_of(RECIPE, [layer.digest for layer in layers], tree.name)

    def fill(root: Path) -> None:
        progress(f"{image.name}: what a rank imports, by taking one step")
        environment = [f"{name}={value}" for name, value in spec.env.items()]
        argv = ["env", "-i", *environment, "python3", "-m", LEARNER]
        printed = run_in_image(layers, spec.uid, [(tree, image.mount_path or "")], argv)
        target = root / spec.site_packages / LIST
        target.parent.mkdir(parents=True)
        target.write_text(printed.strip().splitlines()[-1] + "\n")

    return cached_layer(spec, f"warm-{image.name}-{key}", fill, own_files)
