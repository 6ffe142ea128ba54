"""Where things live: the user's cache and state folders (XDG), and this repository's own files."""

import os
from pathlib import Path

#: kind/ in the repository.
KIND_FOLDER = Path(__file__).resolve().parent.parent

#: One Go module per program family: kind/programs/<family>/go.mod.
MODULES_FOLDER = KIND_FOLDER / "programs"


def cache_folder() -> Path:
    """Programs built once per version; safe to delete at any time."""
    return _xdg("XDG_CACHE_HOME", ".cache") / "llmtrain"


def programs_folder() -> Path:
    """One folder per program and version below the cache."""
    return cache_folder() / "programs"


def clusters_folder() -> Path:
    """One folder per cluster, and the registry of slots beside them."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "llmtrain" / "clusters"


def _xdg(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    # The XDG specification: a relative path in these variables is invalid and to be ignored.
    return Path(value) if os.path.isabs(value) else Path.home() / fallback
