"""Setting the stage: a cluster with our images and our operator on it, ready for jobs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from llmtrain_kind.driver import CLUSTER_COMMAND, REPOSITORY, Driver, DriverError, run

IMAGES_COMMAND = REPOSITORY / "kind" / "images-build"
BUILD_SECONDS = 2400
EXIT_CANNOT_RUN = 3
"""What `kind/cluster check` exits with on a machine that cannot hold a cluster."""


@dataclass
class Phases:
    """Prints what is being done, with its seconds, and keeps the list."""

    taken: list[tuple[str, float]] = field(default_factory=list)
    quiet: bool = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        if not self.quiet:
            print(f"--- {name}", flush=True)
        yield
        seconds = time.monotonic() - start
        self.taken.append((name, seconds))
        if not self.quiet:
            print(f"    {name}: {seconds:.1f} s", flush=True)


def why_no_cluster() -> str:
    """Return one line that says what this machine lacks to hold a cluster, or nothing where it can.

    Raises:
        DriverError: the check itself failed.
    """
    done = subprocess.run([str(CLUSTER_COMMAND), "check"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return ""
    if done.returncode != EXIT_CANNOT_RUN:
        raise DriverError(f"kind/cluster check: exit {done.returncode}\n{done.stderr}")
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@dataclass(frozen=True)
class Props:
    """What a stage is made of: image archives to load, and folders of this machine (SRC:DST) to mount in containers."""

    archives: list[str]
    mounts: list[str]


def build_props() -> Props:
    """Build what is missing: programs (Go) and images (Debian, Python), side by side.

    Minutes the first time, less than a second from the caches later. Safe beside another process that does the same.

    Raises:
        DriverError: a build failed; its output says why.
    """
    with ThreadPoolExecutor(2) as pool:
        programs = pool.submit(_inherit, str(CLUSTER_COMMAND), "programs")
        images = pool.submit(run, sys.executable, str(IMAGES_COMMAND), timeout=BUILD_SECONDS)
        programs.result()
        archives = [line for line in images.result().splitlines() if line.endswith(".tar")]
    return Props(archives, run(sys.executable, str(IMAGES_COMMAND), "--print-mounts", timeout=BUILD_SECONDS).split())


def raise_stage(cluster: str, phases: Phases, nodes: int = 3, operator: bool = True) -> Driver:
    """Build what is missing, start the cluster, load the images and install the operator by its chart."""
    with phases.phase("programs and images"):
        props = build_props()
    with phases.phase(f"cluster of {nodes} nodes"):
        flags = [part for mount in props.mounts for part in ("--mount", mount)]
        _inherit(str(CLUSTER_COMMAND), "up", "--name", cluster, "--nodes", str(nodes), *flags)
    driver = Driver(cluster)
    with phases.phase("load images"):
        run(str(CLUSTER_COMMAND), "load", "--name", cluster, *props.archives)
    if operator:
        with phases.phase("install the operator by its chart"):
            driver.install_operator()
    return driver


def is_standing(cluster: str) -> bool:
    """Tell whether a cluster of this name is there already: what others have started is not ours to end."""
    status = [str(CLUSTER_COMMAND), "status", "--name", cluster, "--json"]
    return subprocess.run(status, capture_output=True, timeout=120, check=False).returncode == 0


@contextmanager
def stage(cluster: str, phases: Phases, keep: bool = False) -> Iterator[Driver]:
    """Raise the stage for the length of a block, then strike it, unless it stood before or shall be kept."""
    stays = keep or is_standing(cluster)
    try:
        yield raise_stage(cluster, phases)
    finally:
        if stays:
            print(f"cluster {cluster} stays; end it with kind/cluster down --name {cluster}", flush=True)
        else:
            with phases.phase("clean up"):
                run(str(CLUSTER_COMMAND), "down", "--name", cluster)


def _inherit(*command: str) -> None:
    """Run a command whose progress the user should see.

    Raises:
        DriverError: it failed.
    """
    done = subprocess.run(command, timeout=BUILD_SECONDS, check=False)
    if done.returncode != 0:
        raise DriverError(f"{' '.join(command)}: exit {done.returncode}")
