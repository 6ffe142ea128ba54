"""Build the programs of a cluster from the Go module proxy, once per version, into the user's cache folder.

<cache>/programs/<program>-<version>/<program>      appears whole, by rename
<cache>/programs/bin-<kubernetes version>/          links to all of them: the folder for PATH
"""

import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmtrain_kind import catalogue
from llmtrain_kind.catalogue import Family
from llmtrain_kind.console import ProgressLine
from llmtrain_kind.errors import Refused
from llmtrain_kind.folders import MODULES_FOLDER, programs_folder
from llmtrain_kind.go_toolchain import environment, find_go, needed_version
from llmtrain_kind.locks import locked
from llmtrain_kind.settings import DEFAULT_KUBERNETES
from llmtrain_kind.shell import run

#: The Go compiler uses every core by itself; two families at a time fill the gaps while one links.
_PARALLEL_FAMILIES = 2
_BUILD_SECONDS = 3600


def ensure(names: tuple[str, ...], kubernetes_version: str = DEFAULT_KUBERNETES) -> Path:
    """Make sure that the programs are there, building what is missing, and return the folder that holds them all.

    Safe to run many times at once; a build that is killed leaves nothing half-made.
    """
    try:
        chosen = catalogue.choose(names, kubernetes_version)
    except KeyError as unknown:
        known = ", ".join(program for family in catalogue.families() for program in family.packages)
        raise Refused(f"unknown program {unknown.args[0]}; there are: {known}") from None
    missing = [family for family in chosen if _missing(family)]
    if missing:
        with ProgressLine("building programs") as progress, ThreadPoolExecutor(_PARALLEL_FAMILIES) as pool:
            list(pool.map(lambda family: _build_family(family, progress), missing))
    return _link_all(chosen, kubernetes_version)


def bin_folder(kubernetes_version: str) -> Path:
    """The folder with links to all programs, for PATH."""
    return programs_folder() / f"bin-{kubernetes_version}"


def purge_cache() -> Path:
    """Remove all built programs; return the folder that was removed."""
    folder = programs_folder()
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _missing(family: Family) -> list[str]:
    return [name for name in family.packages if not _program_path(family, name).exists()]


def _program_path(family: Family, program: str) -> Path:
    return programs_folder() / family.program_folder(program) / program


def _build_family(family: Family, progress: ProgressLine) -> None:
    with locked(programs_folder() / f".{family.name}-{family.version}.lock"):
        missing = _missing(family)
        if not missing:
            return
        with progress.running(f"{family.name} {family.version} ({', '.join(missing)})"):
            _go_build(family, missing)


def _go_build(family: Family, missing: list[str]) -> None:
    draft = programs_folder() / f".{family.name}-{family.version}.tmp"
    # What an earlier, killed build left: nobody else writes here while we hold the family's lock.
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    module = _module_folder(family)
    go = find_go(needed_version(module / "go.mod"))
    # A module's root package is named after its folder, so a single program gets its name from us.
    output = draft / missing[0] if len(missing) == 1 else f"{draft}{os.sep}"
    run(
        [
            *(go, "build", "-C", module, "-mod=readonly", "-buildvcs=false", "-trimpath"),
            *("-ldflags", family.linker_flags(), "-tags", family.tags, "-o", output),
            *(family.packages[name] for name in missing),
        ],
        env=environment(go),
        timeout_seconds=_BUILD_SECONDS,
    )
    for name in missing:
        home = _program_path(family, name).parent
        staged = draft / f"{name}.folder"
        staged.mkdir()
        os.rename(draft / name, staged / name)
        shutil.rmtree(home, ignore_errors=True)
        os.rename(staged, home)
    shutil.rmtree(draft)


def _module_folder(family: Family) -> Path:
    committed = MODULES_FOLDER / family.name
    if family.name != "kubernetes" or family.version == DEFAULT_KUBERNETES:
        return committed
    return _derive_kubernetes_module(family)


def _derive_kubernetes_module(family: Family) -> Path:
    """A module for another Kubernetes version, made in the cache folder.

    k8s.io/kubernetes names its own libraries (k8s.io/api, ...) by folders of its repository; outside of it each needs a
    `replace` by the published module of the same release, v0.MINOR.PATCH.
    """
    folder = programs_folder() / f"module-{family.name}-{family.version}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "go.mod").write_text("module llmtrain.invalid/kubernetes\n")
    go = find_go((1, 21, 0))
    source = f"{family.root}@v{family.version}"
    download = run([go, "mod", "download", "-json", source], env=environment(go), timeout_seconds=900)
    match = re.search(r'"GoMod": "([^"]+)"', download)
    assert match, "go mod download -json names the go.mod file"
    original = Path(match[1]).read_text()
    (folder / "go.mod").write_text(kubernetes_go_mod(original, family.version))
    go = find_go(needed_version(folder / "go.mod"))
    tools = [f"{path}@v{family.version}" for path in catalogue.kubernetes(family.version).packages.values()]
    run([go, "get", "-C", folder, "-tool", *tools], env=environment(go), timeout_seconds=900)
    (folder / "complete").touch()
    return folder


def kubernetes_go_mod(original: str, version: str) -> str:
    """The text of a go.mod that builds Kubernetes from outside, from ``original``, Kubernetes' own go.mod."""
    staging = re.findall(r"^\s*(k8s\.io/[\w-]+) => \./staging/src/", original, re.MULTILINE)
    go_line = re.search(r"^go \S+", original, re.MULTILINE)
    library = "v0." + version.split(".", 1)[1]
    replaces = "\n".join(f"\t{module} => {module} {library}" for module in staging)
    return (
        f"module llmtrain.invalid/kubernetes\n\n{go_line[0] if go_line else 'go 1.24.0'}\n\n"
        f"require k8s.io/kubernetes v{version}\n\nreplace (\n{replaces}\n)\n"
    )


def _link_all(chosen: list[Family], kubernetes_version: str) -> Path:
    folder = bin_folder(kubernetes_version)
    folder.mkdir(parents=True, exist_ok=True)
    for family in chosen:
        for name in family.packages:
            link, target = folder / name, _program_path(family, name)
            if link.is_symlink() and os.readlink(link) == str(target):
                continue
            draft = folder / f".{name}.{os.getpid()}.{threading.get_native_id()}"
            draft.unlink(missing_ok=True)
            draft.symlink_to(target)
            os.replace(draft, link)
    return folder
