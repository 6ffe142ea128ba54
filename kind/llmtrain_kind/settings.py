"""What a cluster was asked to be; kept in its state folder as settings.json."""

import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from llmtrain_kind.errors import Refused
from llmtrain_kind.folders import clusters_folder

DEFAULT_NAME = "llmtrain"
DEFAULT_KUBERNETES = "1.36.3"
MAX_NODES = 16


@dataclass(frozen=True)
class ClusterSettings:
    """The settings of one cluster. ``slot`` numbers it on this machine and decides its names and address ranges."""

    name: str
    provider: str
    nodes: int
    kubernetes: str
    mounts: tuple[tuple[str, str], ...] = ()
    slot: int = -1
    kubeconfig: str = ""

    @property
    def state(self) -> Path:
        """The cluster's state folder."""
        return state_folder(self.name)

    def asked(self) -> dict[str, Any]:
        """The part a user asks for: what two calls of ``up`` must agree on."""
        return {"nodes": self.nodes, "kubernetes": self.kubernetes, "mounts": [list(pair) for pair in self.mounts]}


def state_folder(name: str) -> Path:
    """The state folder of the cluster called ``name``."""
    return clusters_folder() / name


def failed_logs_folder(name: str) -> Path:
    """Where the logs of a start that failed are kept, beside the state folder."""
    return clusters_folder() / f"{name}.failed-logs"


def save(settings: ClusterSettings) -> None:
    """Write settings.json, whole or not at all."""
    settings.state.mkdir(parents=True, exist_ok=True)
    path = settings.state / "settings.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(settings), indent=1))
    os.replace(draft, path)


def load(name: str) -> ClusterSettings | None:
    """The settings of an existing cluster, or None."""
    try:
        raw = json.loads((state_folder(name) / "settings.json").read_text())
    except FileNotFoundError:
        return None
    known = {field.name for field in fields(ClusterSettings)}
    raw["mounts"] = tuple((str(src), str(dst)) for src, dst in raw["mounts"])
    return ClusterSettings(**{key: value for key, value in raw.items() if key in known})


def check_name(name: str) -> str:
    """Return ``name`` if it can name a cluster."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,22}[a-z0-9])?", name):
        raise Refused(f"--name {name!r}: a cluster's name is 1-24 of a-z, 0-9 and '-', begins with a letter")
    return name


def check_nodes(nodes: int) -> int:
    """Return ``nodes`` if a cluster can have so many."""
    if not 1 <= nodes <= MAX_NODES:
        raise Refused(f"--nodes {nodes}: a cluster has 1 to {MAX_NODES} nodes")
    return nodes


def check_version(version: str) -> str:
    """Return a Kubernetes version as MAJOR.MINOR.PATCH."""
    if not re.fullmatch(r"v?1\.\d+\.\d+", version):
        raise Refused(f"--kubernetes {version!r}: give a full version such as {DEFAULT_KUBERNETES}")
    return version.removeprefix("v")


def parse_mount(text: str) -> tuple[str, str]:
    """``SRC:DST`` of --mount as two absolute paths; SRC must exist."""
    source, colon, target = text.partition(":")
    if not colon or not os.path.isabs(source) or not os.path.isabs(target):
        raise Refused(f"--mount {text!r}: give SRC:DST, both absolute paths")
    if not os.path.exists(source):
        raise Refused(f"--mount {text!r}: {source} is not there")
    return os.path.realpath(source), os.path.normpath(target)
