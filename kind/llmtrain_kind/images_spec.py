"""Typed view of kind/images/images.toml, and where images and their parts are kept."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmtrain_kind.errors import ClusterError
from llmtrain_kind.folders import cache_folder

Progress = Callable[[str], None]


class ImageError(ClusterError):
    """The repository's description of the images, or a request for one, makes no sense."""


@dataclass(frozen=True)
class ImageSpec:
    """One image: `extra` and `packages` choose the Python code; `mounted` distributions come from the host instead."""

    name: str
    extra: str
    packages: tuple[str, ...]
    entrypoint: tuple[str, ...]
    description: str
    mounted: tuple[str, ...] = ()
    mount_path: str | None = None


@dataclass(frozen=True)
class BuildSpec:
    """Everything the builder reads from the repository, and the folders it writes to."""

    repo_root: Path
    suite: str
    python: str
    uid: int
    prefix: str
    home: str
    repository: str
    version: str
    env: dict[str, str]
    apt: tuple[str, ...]
    images: dict[str, ImageSpec]

    @property
    def cache(self) -> Path:
        """Layers and resolved versions, by content key."""
        return cache_folder() / "images"

    @property
    def output(self) -> Path:
        """Where the archives go; ignored by git."""
        return self.repo_root / "build" / "images"

    @property
    def site_packages(self) -> str:
        """The image's folder of Python packages, relative to its root."""
        return f"{self.prefix.lstrip('/')}/lib/python{self.python}/site-packages"

    @property
    def constraints(self) -> Path:
        """The exact versions of everything."""
        return self.repo_root / "constraints.txt"


def load_spec(repo_root: Path) -> BuildSpec:
    """Reads images.toml, apt.txt and the project's version. Raises ImageError if `repo_root` is not this repository."""
    folder = repo_root / "kind" / "images"
    if not (folder / "images.toml").is_file():
        raise ImageError(f"{repo_root} has no kind/images/images.toml: give the root of the llmtrain repository")
    data = tomllib.loads((folder / "images.toml").read_text())
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    base = data["base"]
    images = {name: _image(name, table) for name, table in data["image"].items()}
    return BuildSpec(
        repo_root=repo_root,
        suite=base["suite"],
        python=base["python"],
        uid=base["uid"],
        prefix=base["prefix"],
        home=base["home"],
        repository=base["repository"],
        version=project["version"],
        env=dict(base["env"]),
        apt=tuple(read_list(folder / "apt.txt")),
        images=images,
    )


def read_list(path: Path) -> list[str]:
    """Lines of a list file without comments and blank lines."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def _image(name: str, table: dict[str, object]) -> ImageSpec:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return ImageSpec(name=name, **fields)  # type: ignore[arg-type]
