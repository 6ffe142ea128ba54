"""Kernel settings that every kubelet changes on the host: remembered before the first cluster, restored after the last."""

import json
from pathlib import Path

from llmtrain_kind import slots
from llmtrain_kind.folders import clusters_folder
from llmtrain_kind.locks import locked

# setupKernelTunables in pkg/kubelet/cm/container_manager_linux.go
_NAMES = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_PROC = Path("/proc/sys")


def remember() -> None:
    """Write the present values down unless a running cluster has done so."""
    with locked(clusters_folder() / ".sysctls.lock"):
        if not _file().exists():
            values = {name: (_PROC / name).read_text().strip() for name in _NAMES if (_PROC / name).exists()}
            _file().write_text(json.dumps(values))


def restore_after_last() -> None:
    """Put the remembered values back if no cluster is left."""
    with locked(clusters_folder() / ".sysctls.lock"):
        if slots.names() or not _file().exists():
            return
        for name, value in json.loads(_file().read_text()).items():
            (_PROC / name).write_text(value)
        _file().unlink()


def _file() -> Path:
    return clusters_folder() / ".host-sysctls.json"
