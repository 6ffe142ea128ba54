"""How ranks find each other, agree, and part: one TCP store per attempt, one process group, a bounded farewell."""

from __future__ import annotations

import contextlib
import os
import socket
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
"""A rank that is alive but silent this long is lost. A dead one is noticed at once: its sockets close."""
FAREWELL_TIMEOUT = timedelta(seconds=10)


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

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except (RuntimeError, OSError):
            return False


def join(config: RunConfig) -> Ranks:
    """Open this attempt's store and process group. A rank of another attempt cannot join: the prefix differs.

    Raises:
        PeerLostError: not all ranks came in time.
    """
    launch = config.launch
    where = f"{launch.master_address}:{launch.master_port}"
    _choose_interface(launch.master_address, launch.master_port)
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)
    try:
        raw = TCPStore(
            launch.master_address,
            launch.master_port,
            world_size=launch.world_size,
            is_master=config.is_first,
            wait_for_workers=False,
            timeout=RENDEZVOUS_TIMEOUT,
        )
        store = PrefixStore(f"{launch.job_uid or launch.run_id}/{launch.attempt}", raw)
        ranks = Ranks(store, launch.global_rank, launch.world_size, timedelta(seconds=config.start_timeout_seconds))
        ranks.meet("rendezvous", RENDEZVOUS_TIMEOUT)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if config.device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=launch.global_rank,
            world_size=launch.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=config.device if config.device.type == "cuda" else None,
        )
    except (RuntimeError, OSError) as error:
        if "address already in use" in str(error).lower() or "EADDRINUSE" in str(error):
            raise OSError(f"rank 0 cannot listen at {where}: the port is taken: {error}") from error
        raise PeerLostError(
            f"rank {launch.global_rank} of {launch.world_size} did not meet the others at {where} "
            f"within {RENDEZVOUS_TIMEOUT.seconds} s (attempt {launch.attempt}): {error}"
        ) from error
    return ranks


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
