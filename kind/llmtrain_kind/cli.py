"""The command line of ``kind/cluster``."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from llmtrain_kind import archives, catalogue, programs, slots
from llmtrain_kind import settings as settings_file
from llmtrain_kind.console import say
from llmtrain_kind.errors import ClusterError, Refused
from llmtrain_kind.folders import clusters_folder
from llmtrain_kind.locks import locked
from llmtrain_kind.provider import PROVIDERS, Provider, choose, open_provider
from llmtrain_kind.settings import DEFAULT_KUBERNETES, DEFAULT_NAME, ClusterSettings

VERBS = ("kill", "start", "cut", "heal", "slow")

_EPILOG = """\
exit codes: 0 done, 1 failed, 2 refused (a wrong request), 3 this machine cannot run a cluster
See kind/README.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    # Users of Debian other than root have no sbin in their PATH, but ip, tc and nft lie there.
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    options = _parser().parse_args(arguments)
    # As Ctrl-C: a start that is told to end clears away what it has begun.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        options.run(options)
    except ClusterError as error:
        print(f"kind/cluster: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("kind/cluster: interrupted", file=sys.stderr)
        return 130
    return 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kind/cluster",
        description="A Kubernetes cluster for tests on any machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str, named: bool = True) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        if named:
            default = os.environ.get("LLMTRAIN_CLUSTER", DEFAULT_NAME)
            added.add_argument("--name", default=default, help=f"the cluster's name (default {default})")
        return added

    up = command("up", _up, "start the cluster, or mend it; nothing happens if it runs as asked")
    up.add_argument("--nodes", type=int, default=3, help="number of nodes (default 3)")
    up.add_argument("--provider", choices=("auto", *PROVIDERS), default="auto", help="how (default: what works here)")
    up.add_argument("--kubernetes", default=DEFAULT_KUBERNETES, metavar="X.Y.Z", help=f"default {DEFAULT_KUBERNETES}")
    up.add_argument("--mount", action="append", default=[], metavar="SRC:DST", help="read-only, in every container")
    up.add_argument("--recreate", action="store_true", help="replace a running cluster that has other settings")
    command("down", _down, "remove the cluster and all it left, its shared folder included")
    status = command("status", _status, "show the cluster")
    status.add_argument("--json", action="store_true", help="all facts, for programs")
    load = command("load", _load, "load image archives into all nodes")
    load.add_argument("archive", nargs="+", type=Path, metavar="IMAGE.tar")
    command("kubeconfig", _kubeconfig, "print the path of the kubeconfig")
    node = command("node", _node, "fault a node, or mend it: kind/cluster node node-1 slow 50mbit")
    node.add_argument("node", metavar="NODE", help="a node's name, or control-plane (kill and start only)")
    node.add_argument("verb", choices=VERBS)
    node.add_argument("rate", nargs="?", default="", metavar="RATE", help="for slow, as tc(8) writes it: 400mbit")
    pod = command("pod-pid", _pod_pid, "print the host's pid of PID 1 of a pod's container")
    pod.add_argument("namespace", metavar="NAMESPACE")
    pod.add_argument("pod", metavar="POD")
    pod.add_argument("container", nargs="?", default="", metavar="CONTAINER")
    build = command("programs", _programs, "build the programs that are missing; print their folder", named=False)
    build.add_argument("--only", default="", metavar="A,B", help="such as helm,kubectl (default: all)")
    build.add_argument("--kubernetes", default=DEFAULT_KUBERNETES, metavar="X.Y.Z")
    command("check", _check, "can this machine run a cluster? says in one line what is missing", named=False)
    command("purge-cache", _purge_cache, "delete the built programs", named=False)
    return parser


def _up(options: argparse.Namespace) -> None:
    name = settings_file.check_name(options.name)
    mounts = tuple(settings_file.parse_mount(text) for text in options.mount)
    nodes = settings_file.check_nodes(options.nodes)
    kubernetes = settings_file.check_version(options.kubernetes)
    start = time.monotonic()
    with _cluster_lock(name) as lock:
        existing = settings_file.load(name)
        kind = options.provider
        if kind == "auto":
            kind = existing.provider if existing else choose()
        asked = ClusterSettings(name, kind, nodes, kubernetes, mounts)
        if existing and existing.provider != kind:
            raise Refused(f"cluster {name} is one of provider {existing.provider}: run `kind/cluster down` first")
        say(f"cluster {name} ({kind}, {nodes} nodes, Kubernetes {kubernetes})")
        open_provider(kind, existing or asked).up(asked, options.recreate, lock)
        path = _existing(name)[1].kubeconfig()
    say(f"up after {time.monotonic() - start:.1f} s; export KUBECONFIG={path}")


def _down(options: argparse.Namespace) -> None:
    name = settings_file.check_name(options.name)
    start = time.monotonic()
    with _cluster_lock(name):
        existing = settings_file.load(name)
        if existing:
            open_provider(existing.provider, existing).down()
            say(f"cluster {name} is gone, after {time.monotonic() - start:.1f} s")
        else:
            slots.give_back(name)
            say(f"there is no cluster {name}")
        shutil.rmtree(settings_file.failed_logs_folder(name), ignore_errors=True)
        _lock_path(name).unlink()


def _status(options: argparse.Namespace) -> None:
    existing, provider = _existing(options.name)
    facts = {"name": existing.name, "provider": existing.provider, **provider.status()}
    if options.json:
        print(json.dumps(facts, indent=1))
        return
    print(f"{facts['name']}: {facts['provider']}, Kubernetes {facts['kubernetesVersion']}")
    for node in facts["nodes"]:
        notes = [word for word in ("cut", "slow") if node.get(word)]
        state = "down" if not node.get("running", True) else "Ready" if node["ready"] else "not Ready"
        print(f"  {node['name']:<24} {state}{' (' + ', '.join(notes) + ')' if notes else ''}")
    for label in ("kubeconfig", "sharedDir", "auditLog", "binDir"):
        print(f"  {label:<24} {facts[label]}")
    print(f"  {facts['images']}")


def _load(options: argparse.Namespace) -> None:
    found = [archives.read(path.resolve()) for path in options.archive]
    with _cluster_lock(options.name):
        imports = _existing(options.name)[1].load(found)
    names = ", ".join(name for archive in found for name in archive.names)
    say(f"{names}: {f'imported ({imports} imports)' if imports else 'there already'}")


def _kubeconfig(options: argparse.Namespace) -> None:
    print(_existing(options.name)[1].kubeconfig())


def _node(options: argparse.Namespace) -> None:
    if (options.verb == "slow") != bool(options.rate):
        raise Refused("RATE belongs to slow and only to slow: kind/cluster node NODE slow 400mbit")
    with _cluster_lock(options.name) as lock:
        _existing(options.name)[1].node(options.node, options.verb, options.rate, lock)


def _pod_pid(options: argparse.Namespace) -> None:
    print(_existing(options.name)[1].pod_pid(options.namespace, options.pod, options.container))


def _programs(options: argparse.Namespace) -> None:
    wanted = tuple(options.only.split(",")) if options.only else catalogue.local_programs()
    print(programs.ensure(wanted, settings_file.check_version(options.kubernetes)))


def _check(_: argparse.Namespace) -> None:
    print(f"a cluster can run here: {choose()}")


def _purge_cache(_: argparse.Namespace) -> None:
    running = slots.names()
    if running:
        raise Refused(f"clusters run from the cache: {', '.join(running)}; take them down first")
    say(f"removed {programs.purge_cache()}")


def _existing(name: str) -> tuple[ClusterSettings, Provider]:
    found = settings_file.load(settings_file.check_name(name))
    if found is None:
        raise ClusterError(f"there is no cluster {name}: run `kind/cluster up`")
    return found, open_provider(found.provider, found)


def _cluster_lock(name: str) -> AbstractContextManager[int]:
    waiting = f"waiting for another kind/cluster command at work on {name}"
    return locked(_lock_path(name), waiting)


def _lock_path(name: str) -> Path:
    return clusters_folder() / f".{settings_file.check_name(name)}.lock"
