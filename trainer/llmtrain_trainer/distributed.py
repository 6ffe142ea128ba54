"""How ranks find each other, agree, and part: one TCP store per attempt, one process group, a bounded farewell."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import PeerLostError

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
"""A rank that is alive but silent this long is lost. A dead one is noticed at once: its sockets close.

Longer than a hung step may last before the operator names the rank (docs/concepts/hangs.md)."""
FAREWELL_TIMEOUT = timedelta(seconds=10)
CONNECT_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Ranks:
    """The meeting place of one attempt's ranks."""

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    """How long one rank waits for another's word while starting."""

    def tell(self, key: str, value: str) -> None:
        """Publish a value for every rank."""
        self.store.set(key, value)

    def hear(self, key: str) -> str:
        """Wait for a value that some rank publishes.

        Raises:
            PeerLostError: nobody did in time, or the store is gone.
        """
        try:
            self.store.wait([key], self.timeout)
            return str(self.store.get(key).decode())
        except (RuntimeError, OSError) as error:
            raise PeerLostError(f"rank {self.rank} waited in vain for {key!r} of another rank: {error}") from error

    def meet(self, name: str, timeout: timedelta) -> None:
        """Return when every rank has called this with the same name: a barrier that can say who is missing.

        Raises:
            PeerLostError: some did not come in time, or the store is gone.
        """
        self.store.set(f"{name}/{self.rank}", "")
        try:
            self.store.wait([f"{name}/{rank}" for rank in range(self.world_size)], timeout)
        except (RuntimeError, OSError) as error:
            missing = [r for r in range(self.world_size) if not self._has(f"{name}/{r}")]
            raise PeerLostError(
                f"rank {self.rank} of {self.world_size} waited {timeout.seconds} s at {name!r} for rank(s) "
                f"{', '.join(map(str, missing[:16])) or '?'}: {error}"
            ) from error

    def check(self) -> None:
        """Make sure that rank 0, who hosts the store, is still there.

        Raises:
            PeerLostError: it is not.
        """
        try:
            self.store.check([""])
        except (RuntimeError, OSError) as error:
            raise PeerLostError(f"rank {self.rank} lost rank 0 while starting: {error}") from error

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except (RuntimeError, OSError):
            return False


def join(config: RunConfig) -> Ranks:
    """Open this attempt's store and process group. A rank of another attempt cannot join: the prefix differs.

    Raises:
        PeerLostError: not all ranks came in time.
        OSError: rank 0 cannot listen, because the port is taken.
    """
    launch, on_gpu = config.launch, config.device.type == "cuda"
    _choose_interface(launch.master_address, launch.master_port)
    if on_gpu:
        torch.cuda.set_device(config.device)
    timeout = timedelta(seconds=config.start_timeout_seconds)
    ranks = Ranks(_open_store(config), launch.global_rank, launch.world_size, timeout)
    ranks.meet("rendezvous", min(RENDEZVOUS_TIMEOUT, timeout))
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=PrefixStore("group", ranks.store),
            rank=launch.global_rank,
            world_size=launch.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=config.device if on_gpu else None,
        )
    except (RuntimeError, OSError) as error:
        raise PeerLostError(f"rank {launch.global_rank} could not connect to the other ranks: {error}") from error
    return ranks


def _open_store(config: RunConfig) -> Store:
    launch = config.launch
    where = f"{launch.master_address}:{launch.master_port}"
    timeout = min(RENDEZVOUS_TIMEOUT, timedelta(seconds=config.start_timeout_seconds))
    if not config.is_first:
        _wait_for_listener(launch.master_address, launch.master_port, timeout)
    try:
        raw = TCPStore(
            launch.master_address,
            launch.master_port,
            world_size=launch.world_size,
            is_master=config.is_first,
            wait_for_workers=False,
            timeout=timeout,
        )
    except (RuntimeError, OSError) as error:
        if config.is_first:
            raise OSError(f"rank 0 cannot listen at {where}: {error}") from error
        raise PeerLostError(f"rank {launch.global_rank} did not find rank 0 at {where}: {error}") from error
    return PrefixStore(f"{launch.job_uid or launch.run_id}/{launch.attempt}", raw)


def _wait_for_listener(address: str, port: int, timeout: timedelta) -> None:
    """Return when rank 0 listens. TCPStore's own retries wait up to a second in between, and overrun the timeout."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((address, port), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"rank 0 did not listen at {address}:{port} within {timeout.total_seconds():.0f} s: {error}"
                ) from error
        time.sleep(CONNECT_POLL_SECONDS)


def leave(ranks: Ranks) -> None:
    """Part from the other ranks after success; rank 0, who hosts the store, leaves last.

    Without destroying the group, gloo's threads abort nearly every successful process at exit (pytorch PR #179291).
    Failures here are ignored: the work is done and committed.
    """
    with contextlib.suppress(RuntimeError, OSError, PeerLostError):
        ranks.meet("farewell", FAREWELL_TIMEOUT)
        dist.destroy_process_group()
        ranks.store.set(f"left/{ranks.rank}", "")
        if ranks.rank == 0:
            ranks.store.wait([f"left/{rank}" for rank in range(ranks.world_size)], FAREWELL_TIMEOUT)


def _choose_interface(master_address: str, master_port: int) -> None:
    """Tell gloo to use the interface that leads to rank 0, unless the user chose one.

    Gloo's own choice is the address of the host's name, which in a pod or on a laptop may be another one or none.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        family, _, _, _, target = socket.getaddrinfo(master_address, master_port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only makes the kernel choose the route
            own = probe.getsockname()[0]
    except OSError:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return
