"""Can this machine carry a local cluster? Found out by trying each thing a cluster needs, not by asking who we are."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from llmtrain_kind.console import say
from llmtrain_kind.errors import CannotRunHere, ClusterError
from llmtrain_kind.local import cgroups, network
from llmtrain_kind.processes import find_process
from llmtrain_kind.shell import run, succeeds

#: Command -> the Debian package that brings it.
COMMANDS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "openssl": "openssl",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "runc": "runc",
}
_TRACE = "llmtrain-check-"
"""And the pid of who checks: what a check makes outside its own namespaces is named so."""


def check(install: bool) -> None:
    """Raise CannotRunHere, with one line, at the first thing that does not work.

    With ``install`` missing Debian packages are installed; without it they count as there if they could be.
    """
    if not sys.platform.startswith("linux"):
        raise CannotRunHere(f"the local cluster needs Linux, this is {sys.platform}")
    missing = _missing_commands()
    if missing and _apt_works() and install:
        _install(missing)
        missing = _missing_commands()
    if missing and not (_apt_works() and not install):
        packages = " ".join(sorted({COMMANDS[name] for name in missing}))
        raise CannotRunHere(f"missing programs: {', '.join(missing)} (Debian, as root: apt-get install {packages})")
    _clear_what_killed_checks_left()
    for what, attempt in _attempts(missing):
        try:
            attempt()
        except (OSError, ClusterError) as error:
            if isinstance(error, CannotRunHere):
                raise
            reason = str(error).strip().splitlines()[-1]
            raise CannotRunHere(
                f"this machine does not let us {what} ({reason}): run as root, in a container with --privileged"
            ) from error


def snapshotter(state: Path) -> str:
    """`overlayfs`, or `native` (plain copies, slower) where an overlay cannot be mounted on the state folder's disk."""
    state.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=state) as folder:
        for name in ("lower", "upper", "work", "merged"):
            (Path(folder) / name).mkdir()
        options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
        works = succeeds(["unshare", "--mount", "mount", "-t", "overlay", "none", "-o", options, f"{folder}/merged"])
    return "overlayfs" if works else "native"


def _attempts(missing: list[str]) -> list[tuple[str, Callable[[], object]]]:
    alone = ["unshare", "--net"]
    attempts: list[tuple[str, tuple[str, ...], Callable[[], object]]] = [
        ("create a network namespace", ("unshare",), lambda: run([*alone, "true"])),
        ("mount a file system", ("unshare",), _try_mount),
        ("name a network namespace", ("ip",), _try_named_namespace),
        ("create a bridge", ("ip",), lambda: run([*alone, "ip", "link", "add", "t0", "type", "bridge"])),
        ("create a veth pair", ("ip",), lambda: run([*alone, "ip", "link", "add", "t0", "type", "veth"])),
        ("write nftables rules", ("nft",), lambda: run([*alone, "nft", "add", "table", "ip", "t"])),
        ("create cgroups", (), _try_cgroup),
        ("read /dev/kmsg", (), lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY))),
        ("filter bridged traffic (kernel module br_netfilter)", (), _try_bridge_filter),
    ]
    # What needs a package that `up` will install cannot be tried before.
    return [(what, attempt) for what, needs, attempt in attempts if not set(needs) & set(missing)]


def _try_mount() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", folder])


def _clear_what_killed_checks_left() -> None:
    trees = cgroups.find()
    names = {folder.name for root in trees.all_roots for folder in root.glob(f"{_TRACE}*")}
    if shutil.which("ip"):
        names |= set(network.namespaces_of(_TRACE.rstrip("-")))
    for name in names:
        pid = name.removeprefix(_TRACE)
        if pid.isdecimal() and find_process(int(pid)) is None:
            trees.remove(f"/{name}")
            if shutil.which("ip"):
                network.remove_namespace(name)


def _try_named_namespace() -> None:
    name = f"{_TRACE}{os.getpid()}"
    run(["ip", "netns", "add", name])
    run(["ip", "netns", "delete", name])


def _try_cgroup() -> None:
    name = f"/{_TRACE}{os.getpid()}"
    trees = cgroups.find()
    try:
        trees.make(name)
    finally:
        trees.remove(name)


def _try_bridge_filter() -> None:
    if not Path("/proc/sys/net/bridge").exists():
        run(["modprobe", "br_netfilter"])


def _missing_commands() -> list[str]:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in COMMANDS if not shutil.which(name, path=path)]


def _apt_works() -> bool:
    return shutil.which("apt-get") is not None and os.access("/var/lib/dpkg/lock", os.W_OK)


def _install(missing: list[str]) -> None:
    packages = sorted({COMMANDS[name] for name in missing})
    say(f"    installing Debian packages: {' '.join(packages)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    try:
        run(install, env=env, timeout_seconds=600)
    except ClusterError:
        # A fresh machine has no package lists yet.
        run(["apt-get", "update", "-qq"], env=env, timeout_seconds=600)
        run(install, env=env, timeout_seconds=600)
