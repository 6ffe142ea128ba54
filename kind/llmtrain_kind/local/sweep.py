"""Find and clear everything a cluster has on this machine, whether it ended in order or was killed half-way.

Nothing is found by a program's name: by recorded pid and start time, by network namespace, by cgroup, by path.
Mounts need no clearing: they are made in the nodes' own mount namespaces and end with the nodes' processes.
"""

import shutil
import time
from pathlib import Path

from llmtrain_kind import processes
from llmtrain_kind.errors import ClusterError
from llmtrain_kind.local import cgroups as cgroup_trees
from llmtrain_kind.local import network
from llmtrain_kind.local.cgroups import Cgroups
from llmtrain_kind.local.layout import Node, slot_name
from llmtrain_kind.local.mounts import mounts_below
from llmtrain_kind.processes import Process
from llmtrain_kind.settings import ClusterSettings

_END_SECONDS = 30.0


def sweep(settings: ClusterSettings) -> None:
    """End all processes of the cluster and remove all it made outside its state folder; a second call finds nothing."""
    prefix = slot_name(settings.slot)
    run_folder = Path("/run") / prefix
    trees = cgroup_trees.find()
    # The cables first: no dying process shall talk to one that still lives.
    for cable in Path("/sys/class/net").glob(f"{prefix}n*"):
        network.remove_link(cable.name)
    namespaces = network.namespaces_of(prefix)
    _end(list((settings.state / "pids").glob("*")), namespaces, f"/{prefix}", trees)
    for namespace in namespaces:
        network.remove_namespace(namespace)
    network.remove_link(prefix)
    trees.remove(f"/{prefix}")
    _remove_folder(run_folder)


def remove_state(settings: ClusterSettings, keep: tuple[str, ...] = ()) -> None:
    """Delete the cluster's state folder, or all of it but the entries in ``keep``."""
    for entry in list(settings.state.iterdir()) if settings.state.exists() else []:
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            _remove_folder(entry)
        else:
            entry.unlink()
    if not keep and settings.state.exists():
        settings.state.rmdir()


def end_node(node: Node, trees: Cgroups) -> None:
    """End all processes of one node, its pods' included."""
    records = list(node.record("x").parent.glob(f"{node.name}.*"))
    _end(records, [node.netns], node.cgroup, trees)


def slot_is_free(slot: int) -> bool:
    """Whether nothing of this slot exists on the machine."""
    prefix = slot_name(slot)
    traces = [Path("/sys/class/net") / prefix, Path("/run") / prefix]
    return (
        not any(trace.exists() for trace in traces)
        and not network.namespaces_of(prefix)
        and not cgroup_trees.find().folders(f"/{prefix}")
        and not network.overlapping_routes([f"10.{base + slot}.0.0/16" for base in (144, 176)] + [f"10.89.{slot}.0/24"])
    )


def _end(records: list[Path], namespaces: list[str], cgroup: str, trees: Cgroups) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while True:
        found: list[Process] = [p for record in records if (p := processes.read_record(record)) and p.alive()]
        for namespace in namespaces:
            found += network.processes_in(namespace)
        found += trees.processes(cgroup)
        living = [process for process in found if process.alive()]
        if not living:
            break
        # Again and again: a shim may start one more process between our look and its end.
        for process in living:
            process.kill()
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {sorted({p.pid for p in living})} do not end after SIGKILL")
        time.sleep(0.01)
    for record in records:
        record.unlink(missing_ok=True)


def _remove_folder(folder: Path) -> None:
    """Delete a folder of ours, never through a mount into somebody else's files."""
    if mounts_below(folder):
        raise ClusterError(f"{folder} still has mounts below it: not deleted")
    if folder.exists():
        shutil.rmtree(folder)
