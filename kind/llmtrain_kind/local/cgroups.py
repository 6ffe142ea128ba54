"""The cluster's own part of the cgroup tree, for version 1 (one tree per controller), version 2 and the mix of both.

Everything lies below /llmtrain<slot>: on version 2 a delegated subtree whose controllers are switched on from the root
down, on version 1 a folder in every hierarchy, with cpuset's two mandatory files filled in.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from llmtrain_kind.errors import CannotRunHere, ClusterError
from llmtrain_kind.processes import Process, find_process

_ROOT = Path("/sys/fs/cgroup")

#: What a kubelet asks for on version 2, where the kernel has it (pkg/kubelet/cm/cgroup_v2_manager_linux.go), and io.
_NEEDED = {"cpu", "cpuset", "memory", "hugetlb", "pids", "io"}


@dataclass(frozen=True)
class Cgroups:
    """The hierarchies with controllers (``roots``), ``unified`` when that is version 2 alone, and all mounted ones."""

    unified: bool
    roots: tuple[Path, ...]
    all_roots: tuple[Path, ...]

    def folders(self, path: str) -> list[Path]:
        """The folders that a cgroup path such as /llmtrain0/node-1 has in all hierarchies, where they exist."""
        return [folder for root in self.all_roots if (folder := root / path.lstrip("/")).is_dir()]

    def make(self, path: str) -> None:
        """Create a cgroup and its parents in every hierarchy, with all controllers available inside."""
        for root in self.roots:
            folder = root
            for part in path.strip("/").split("/"):
                if self.unified:
                    _enable_controllers(folder, root)
                parent, folder = folder, folder / part
                folder.mkdir(exist_ok=True)
                for name in ("cpuset.cpus", "cpuset.mems"):
                    if not self.unified and (folder / name).exists():
                        (folder / name).write_text((parent / name).read_text())
            if self.unified:
                _enable_controllers(folder, root)

    def processes(self, path: str) -> list[Process]:
        """All processes at or below a cgroup path."""
        pids = {
            int(pid)
            for folder in self.folders(path)
            for inner, _, files in os.walk(folder)
            if "cgroup.procs" in files
            for pid in _read(Path(inner) / "cgroup.procs").split()
        }
        return [process for pid in sorted(pids) if (process := find_process(pid))]

    def remove(self, path: str, seconds: float = 10) -> None:
        """Remove a cgroup and all below it; its processes must have ended."""
        deadline = time.monotonic() + seconds
        for top in self.folders(path):
            for inner, _, _ in os.walk(top, topdown=False):
                # The kernel lets go of a cgroup a moment after its last process has ended.
                while not _remove_folder(inner):
                    if time.monotonic() > deadline:
                        raise ClusterError(f"cgroup {inner} cannot be removed: it still holds processes")
                    time.sleep(0.01)


def find() -> Cgroups:
    """The hierarchies of this machine; raises CannotRunHere when there are none."""
    if (_ROOT / "cgroup.controllers").exists():
        return Cgroups(True, (_ROOT,), (_ROOT,))
    mounts = Path("/proc/self/mounts").read_text()
    roots = hierarchies(mounts, "cgroup")
    if not roots:
        raise CannotRunHere(f"no cgroup hierarchy is mounted below {_ROOT}")
    # In the mixed layout the version 2 tree carries no controllers, but runc makes its folders there too.
    return Cgroups(False, roots, roots + hierarchies(mounts, "cgroup2"))


def hierarchies(mounts: str, kind: str) -> tuple[Path, ...]:
    """The mount points of type ``kind`` (cgroup or cgroup2) in the text of /proc/mounts, each once."""
    fields = [line.split() for line in mounts.splitlines()]
    return tuple(sorted({Path(words[1]) for words in fields if len(words) > 2 and words[2] == kind}))


def _enable_controllers(folder: Path, root: Path) -> None:
    available = _NEEDED & set(_read(folder / "cgroup.controllers").split())
    missing = available - set(_read(folder / "cgroup.subtree_control").split())
    if not missing:
        return
    try:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))
    except OSError as error:
        # Only the machine's real root may hold processes and share controllers out; a container's root may not.
        if folder == root and "cgroup.type" in os.listdir(root):
            raise CannotRunHere(
                f"cgroup {root} holds processes, so its controllers cannot be given to children ({error}): "
                "start the container with --cgroupns=host, or move its processes into a child cgroup first"
            ) from error
        raise


def _remove_folder(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
