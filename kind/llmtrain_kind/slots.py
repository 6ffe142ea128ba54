"""Which slot (0..15) each cluster of this machine has; a slot decides a cluster's names, addresses and ranges.

The registry is one JSON file guarded by a lock. An entry is written before anything that carries the slot's number
exists and erased after the last of it is gone.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from llmtrain_kind.errors import CannotRunHere
from llmtrain_kind.folders import clusters_folder
from llmtrain_kind.locks import locked

SLOTS = range(16)


def take(name: str, free_on_machine: Callable[[int], bool]) -> int:
    """The slot of the cluster ``name``: the one it has, else the first that nobody has.

    ``free_on_machine`` says whether nothing of the slot exists on the machine: it may belong to a cluster of another
    state folder, which this registry does not know.
    """
    with locked(_lock_path()):
        registry = _read()
        if name not in registry:
            taken = set(registry.values())
            for slot in SLOTS:
                if slot not in taken and free_on_machine(slot):
                    break
            else:
                names = ", ".join(sorted(registry)) or "clusters of other state folders"
                raise CannotRunHere(f"all {len(SLOTS)} cluster slots of this machine are taken ({names})")
            registry[name] = slot
            _write(registry)
        return registry[name]


def give_back(name: str) -> None:
    """Free the slot of ``name``; nothing happens if it has none."""
    with locked(_lock_path()):
        registry = _read()
        if registry.pop(name, None) is not None:
            _write(registry)


def names() -> list[str]:
    """All clusters that have a slot."""
    return sorted(_read())


def _lock_path() -> Path:
    return clusters_folder() / ".slots.lock"


def _file() -> Path:
    return clusters_folder() / ".slots.json"


def _read() -> dict[str, int]:
    try:
        return {str(name): int(slot) for name, slot in json.loads(_file().read_text()).items()}
    except FileNotFoundError:
        return {}


def _write(registry: dict[str, int]) -> None:
    draft = _file().with_suffix(".tmp")
    draft.write_text(json.dumps(registry, indent=1))
    os.replace(draft, _file())
