"""Load image archives into nodes; what a node has already, by content, is skipped."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from llmtrain_kind.archives import Archive
from llmtrain_kind.errors import Refused
from llmtrain_kind.local import control_plane, nodes
from llmtrain_kind.local.layout import Layout, Node
from llmtrain_kind.shell import run

_IMPORT_SECONDS = 900


def load(layout: Layout, archives: list[Archive]) -> int:
    """Load the archives into all nodes at once; the number of imports that were necessary."""
    down = [node.name for node in layout.nodes if not nodes.alive(node)]
    if down:
        raise Refused(f"{', '.join(down)} does not run: start it first (kind/cluster node {down[0]} start)")
    with ThreadPoolExecutor(len(layout.nodes)) as pool:
        return sum(pool.map(lambda node: _load_into(node, archives), layout.nodes))


def _load_into(node: Node, archives: list[Archive]) -> int:
    present = _image_names(node)
    loaded = _loaded(node)
    imports = 0
    for archive in archives:
        if all(name in present and loaded.get(name) == archive.digest for name in archive.names):
            continue
        run([*nodes.ctr(node), "images", "import", archive.path], timeout_seconds=_IMPORT_SECONDS)
        control_plane.wait(
            node.cluster,
            f"{node.name} to know the images of {archive.path.name}",
            (f"{node.name}.containerd",),
            partial(_known_to_kubelet, node, archive.names),
        )
        loaded.update(dict.fromkeys(archive.names, archive.digest))
        draft = node.folder / "loaded.json.tmp"
        draft.write_text(json.dumps(loaded, indent=1))
        os.replace(draft, node.folder / "loaded.json")
        imports += 1
    return imports


def _loaded(node: Node) -> dict[str, str]:
    try:
        return dict(json.loads((node.folder / "loaded.json").read_text()))
    except FileNotFoundError:
        return {}


def _image_names(node: Node) -> set[str]:
    return set(run([*nodes.ctr(node), "images", "ls", "-q"]).split())


def _known_to_kubelet(node: Node, names: tuple[str, ...]) -> bool:
    """Whether containerd's CRI side has taken the images in: it does so a moment after the import, and labels them."""
    # A label's name with dots in it has to be quoted in containerd's filter language.
    query = 'labels."io.cri-containerd.image"==managed'
    return set(names) <= set(run([*nodes.ctr(node), "images", "ls", "-q", query]).split())
