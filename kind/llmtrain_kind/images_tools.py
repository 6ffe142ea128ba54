"""What the image builder needs from the machine: commands, locks, content-keyed folders, uv, Debian's sources."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from llmtrain_kind.images_spec import BuildSpec, ImageError, Progress, cache_root

DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
TEMPORARY_PREFIX = ".tmp-"


def run(argv: list[str], *, env: dict[str, str] | None = None) -> str:
    """Runs a command at low priority and returns its standard output; ImageError with the end of its output if it fails.

    Builds share the machine with a running cluster, hence `nice`.
    """
    argv = ["nice", *argv] if shutil.which("nice") else argv
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise ImageError(f"`{' '.join(argv)}` ended with {done.returncode}:\n{tail}")
    return done.stdout


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the one lock of a cache folder, and clears the half-made entries that a killed builder left in it.

    The lock dies with its process, so after a kill -9 the next builder gets it; whoever holds it is the only writer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in folder.glob(TEMPORARY_PREFIX + "*"):
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
    on_path = shutil.which("uv", path=os.pathsep.join([os.environ.get("PATH", ""), str(spec.repo_root / ".venv" / "bin")]))
    if on_path:
        return on_path
    tools = cache_root() / "tools"

    def install(folder: Path) -> None:
        progress("installing uv with pip")
        pins = ["-c", str(spec.constraints)] if spec.constraints.is_file() else []
        run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *pins, "uv"])

    with locked(tools):
        return str(cached(tools, "uv", install) / "bin" / "uv")


def resolver_target(spec: BuildSpec) -> list[str]:
    """uv options that choose wheels for the image's Python and C library, whatever interpreter runs this builder."""
    arch = platform.machine()
    return ["--python-version", spec.python, "--python-platform", f"{arch}-manylinux_2_36"]


def need_root() -> None:
    """ImageError unless we are root: a root filesystem holds files of several owners, and chroot needs it."""
    if os.geteuid() != 0:
        raise ImageError("building image archives needs root (mmdebstrap, chroot); without it use the Dockerfiles")


def need_mmdebstrap(progress: Progress) -> None:
    """Installs mmdebstrap with apt if it is missing. ImageError where there is no apt."""
    if shutil.which("mmdebstrap") and Path(DEBIAN_KEYRING).exists():
        return
    if not shutil.which("apt-get"):
        raise ImageError("mmdebstrap is missing and this machine has no apt-get: install mmdebstrap")
    progress("installing mmdebstrap with apt-get")
    packages = ["mmdebstrap", "debian-archive-keyring"]
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], env=env)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], env=env)


def debian_sources(suite: str) -> list[str]:
    """The machine's own Debian mirrors as apt source lines for `suite`; empty (mmdebstrap's default) if it has none."""
    if not shutil.which("apt-get"):
        return []
    listing = ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)", "Created-By: Packages"]
    targets = run(listing)
    if not targets.strip():
        run(["apt-get", "update", "-qq"])
        targets = run(listing)
    lines = set()
    for origin, uri, release, component in (line.split("|") for line in targets.splitlines()):
        _, dash, pocket = release.partition("-")
        if origin == "Debian" and component == "main" and pocket in ("", "updates", "security"):
            lines.add(f"deb [signed-by={DEBIAN_KEYRING}] {uri} {suite}{dash}{pocket} main")
    return sorted(lines)
