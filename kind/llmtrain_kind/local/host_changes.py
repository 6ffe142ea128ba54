"""What a cluster changes on the host itself: undone after the last one is gone.

Two things cannot be kept inside a node: kernel settings that every kubelet sets, and the folders whose paths are fixed
in the programs' code. The latter stay empty: each node sees its own folders there (see ``nodes.PRIVATE_FOLDERS``).
"""

import json
import os
from pathlib import Path

from llmtrain_kind import slots
from llmtrain_kind.folders import clusters_folder
from llmtrain_kind.locks import locked

# setupKernelTunables in pkg/kubelet/cm/container_manager_linux.go
_SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_PROC = Path("/proc/sys")


def remember(folders: list[Path]) -> None:
    """Write the present state down, unless a running cluster has done so, and make the folders that are missing."""
    with locked(_lock()):
        if not _file().exists():
            sysctls = {name: (_PROC / name).read_text().strip() for name in _SYSCTLS if (_PROC / name).exists()}
            made = [str(folder) for folder in folders if not folder.exists()]
            draft = _file().with_suffix(".tmp")
            draft.write_text(json.dumps({"sysctls": sysctls, "folders": made}))
            os.replace(draft, _file())  # whole or not at all: half of it would be in the way of every later command
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)


def undo_after_last() -> None:
    """Put everything back if no cluster is left."""
    with locked(_lock()):
        if slots.names() or not _file().exists():
            return
        memory = json.loads(_file().read_text())
        for name, value in memory["sysctls"].items():
            (_PROC / name).write_text(value)
        for folder in memory["folders"]:
            try:
                Path(folder).rmdir()
            except OSError:
                # Gone, or somebody else uses it by now.
                continue
        _file().unlink()


def _lock() -> Path:
    return clusters_folder() / ".host-changes.lock"


def _file() -> Path:
    return clusters_folder() / ".host-changes.json"
