"""What the image builder needs from the machine: commands, locks, content-keyed folders, uv, Debian's sources."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from llmtrain_kind import locks, shell
from llmtrain_kind.errors import CannotRunHere, ClusterError
from llmtrain_kind.folders import cache_folder
from llmtrain_kind.images_spec import BuildSpec, Progress
from llmtrain_kind.package_index import uv_environment

DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
APT_TARGET_FORMAT = "$(ORIGIN)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
TEMPORARY_PREFIX = ".tmp-"
# torch is 5 GB: on a slow line it takes long, but a build that hangs has to end.
BUILD_TIMEOUT_SECONDS = 3600


def run(argv: list[str], env: dict[str, str] | None = None) -> str:
    """Runs a command at low priority, since builds share the machine with a running cluster; returns its output.

    The command is killed when this process dies, however it dies: nothing may write on into a folder that the next
    builder clears. Raises ClusterError with the end of the command's output if it fails.
    """
    command = ["setpriv", "--pdeathsig", "KILL", "nice", *argv]
    return shell.run(command, env=env, timeout_seconds=BUILD_TIMEOUT_SECONDS)


def run_isolated(argv: list[str], env: dict[str, str] | None = None) -> str:
    """Like run(), with mounts and processes of its own (as root): both end with the command, or with this process."""
    namespaces = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return run(["unshare", *namespaces, *argv], env)


@contextlib.contextmanager
def locked_cache(folder: Path, progress: Progress) -> Iterator[None]:
    """Holds the one lock of a cache folder, and clears the half-made entries that a killed builder left in it.

    The lock dies with its process, so after a kill -9 the next builder gets it; whoever holds it is the only writer.
    """
    with locks.locked(folder / ".lock", f"another build uses {folder}; waiting for it"):
        for stale in folder.glob(TEMPORARY_PREFIX + "*"):
            progress(f"removing {stale.name}, left by a build that was stopped")
            shutil.rmtree(stale)
        yield


def cached(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The entry `name` of a locked cache folder; `make` fills an empty folder, which appears only when complete."""
    entry = folder / name
    if entry.is_dir():
        os.utime(entry)
        return entry
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder))
    try:
        make(temporary)
        temporary.chmod(0o755)
        temporary.rename(entry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return entry


def prune(folder: Path, prefix: str, keep: int) -> None:
    """Removes all but the `keep` last used entries that start with `prefix` from a locked cache folder."""
    entries = sorted(folder.glob(prefix + "-*"), key=lambda entry: entry.stat().st_mtime, reverse=True)
    for entry in entries[keep:]:
        shutil.rmtree(entry)


def key_of(*parts: object) -> str:
    """A short content key of anything JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def files_key(root: Path, paths: list[Path]) -> str:
    """A content key of files and folders below `root`: names, executable bits and bytes; bytecode is left out."""
    digest = hashlib.sha256()
    for path in paths:
        members = sorted(path.rglob("*")) if path.is_dir() else [path]
        for member in members:
            if not member.is_file() or member.suffix == ".pyc":
                continue
            executable = member.stat().st_mode & 0o100
            digest.update(f"{member.relative_to(root)}\0{executable}\0{member.stat().st_size}\0".encode())
            digest.update(member.read_bytes())
    return digest.hexdigest()[:16]


def uv(spec: BuildSpec, progress: Progress) -> str:
    """A uv program: on PATH, in the repository's .venv, or put into the cache by pip once."""
    folders = os.pathsep.join([os.environ.get("PATH", ""), str(spec.repo_root / ".venv" / "bin")])
    found = shutil.which("uv", path=folders)
    if found:
        return found
    pin = next(line.split()[0] for line in spec.constraints.read_text().splitlines() if line.startswith("uv=="))
    tools = cache_folder() / "tools"

    def install(folder: Path) -> None:
        progress(f"installing {pin} with pip")
        run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), pin])

    with locked_cache(tools, progress):
        return str(cached(tools, pin, install) / "bin" / "uv")


def uv_offline_first(spec: BuildSpec, progress: Progress, arguments: list[str]) -> str:
    """Runs uv with what its cache holds, and only if that is not enough with the network: a warm build needs none."""
    program = uv(spec, progress)
    try:
        return run([program, *arguments, "--offline"])
    except ClusterError:
        return run([program, *arguments], uv_environment())


def resolver_target(spec: BuildSpec) -> list[str]:
    """uv options that choose wheels for the image's Python and C library, whatever interpreter runs this builder."""
    arch = platform.machine()
    return ["--python-version", spec.python, "--python-platform", f"{arch}-manylinux_2_36"]


def need_root() -> None:
    """CannotRunHere unless we may keep files of several owners, mount and chroot; found out by trying."""
    if os.geteuid() != 0 or not shell.succeeds(["unshare", "--mount", "--pid", "--fork", "true"]):
        raise CannotRunHere(
            "building image archives needs root that may mount (mmdebstrap, chroot): use sudo, a privileged container, "
            "or build operator/Dockerfile and trainer/Dockerfile with Docker or podman"
        )


def need_mmdebstrap(progress: Progress) -> None:
    """Installs mmdebstrap with apt if it is missing. CannotRunHere where there is no apt."""
    if shutil.which("mmdebstrap") and Path(DEBIAN_KEYRING).exists():
        return
    if not shutil.which("apt-get"):
        raise CannotRunHere("mmdebstrap is missing and this machine has no apt-get: install mmdebstrap")
    progress("installing mmdebstrap with apt-get")
    packages = ["mmdebstrap", "debian-archive-keyring"]
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], env=env)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], env=env)


def debian_sources(suite: str) -> list[str]:
    """The machine's own Debian mirrors as apt source lines for `suite`; empty (mmdebstrap's default) if it has none."""
    if not shutil.which("apt-get"):
        return []
    listing = ["apt-get", "indextargets", "--format", APT_TARGET_FORMAT, "Created-By: Packages"]
    targets = run(listing)
    if not targets.strip():
        run(["apt-get", "update", "-qq"])
        targets = run(listing)
    return source_lines(targets, suite)


def source_lines(targets: str, suite: str) -> list[str]:
    """Turns apt's index targets (APT_TARGET_FORMAT) into source lines for `suite`, the machine's own release or not."""
    lines = set()
    for origin, uri, release, component in (line.split("|") for line in targets.splitlines()):
        _, dash, pocket = release.partition("-")
        if origin == "Debian" and component == "main" and pocket in ("", "updates", "security"):
            lines.add(f"deb [signed-by={DEBIAN_KEYRING}] {uri} {suite}{dash}{pocket} main")
    return sorted(lines)
