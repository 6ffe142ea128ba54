"""Runs the image's own programs without a container runtime: chroot in a private mount namespace."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from llmtrain_kind.images_oci import Layer
from llmtrain_kind.images_tools import run_isolated


def compile_bytecode(base_root: Path, folder: Path, inside: str, *, strict: bool) -> None:
    """Compiles `folder` with the Python of the base layer, which sees it at the path `inside`.

    Without bytecode a pod starts 2.3 times as slowly, and uid 65532 could not write any. Unchecked hashes: layers are
    immutable, so no source is looked at again, and the files do not depend on times. `strict`: a syntax error is an
    error (other people's packages carry templates and files for newer Pythons).
    """
    compile_all = "python3 -m compileall -q -j 2 --invalidation-mode unchecked-hash " + shlex.quote(inside)
    if not strict:
        compile_all += " >/dev/null || true"
    target = shlex.quote(str(base_root) + inside)
    script = (
        f"set -e; mount --bind {shlex.quote(str(folder))} {target}; "
        f"exec chroot {shlex.quote(str(base_root))} sh -c {shlex.quote(compile_all)}"
    )
    run_isolated(["sh", "-c", script])


def run_in_image(layers: list[Layer], uid: int, mounts: list[tuple[Path, str]], argv: list[str]) -> str:
    """Runs `argv` as a restricted pod would: the image read-only, /tmp writable, mounts read-only, as `uid`.

    Returns standard output; raises ClusterError with the program's output if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="llmtrain-image-") as folder:
        root = shlex.quote(folder)
        lower = shlex.quote(":".join(str(layer.root) for layer in reversed(layers)))
        # The temporary file system lives in this mount namespace only, so nothing is left after any kind of end.
        lines = ["set -e", f"mount -t overlay -o ro,lowerdir={lower} image {root}"]
        lines += [f"mount -t tmpfs -o mode=1777 tmp {root}/tmp", f"mount --rbind /proc {root}/proc"]
        lines += [f"mount --rbind /dev {root}/dev"]
        for source, target in mounts:
            point = shlex.quote(folder + target)
            lines += [f"mount --bind {shlex.quote(str(source))} {point}", f"mount -o remount,bind,ro {point}"]
        lines += [f"exec chroot --userspec={uid}:{uid} --groups= {root} {shlex.join(argv)}"]
        return run_isolated(["sh", "-c", "\n".join(lines)])
