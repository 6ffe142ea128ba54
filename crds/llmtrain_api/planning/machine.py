"""Machines by name: what a rank's device can do, and how fast ranks reach each other.

Peaks are dense bf16 without sparsity, from the makers' data sheets: A100 80GB SXM (NVIDIA A100 datasheet, 2021), H100
SXM5 (H100 datasheet, 2023), H200 SXM (H200 datasheet, 2024), B200 in HGX B200 / DGX B200 (DGX B200 datasheet, 2024);
others that a job may meet have only their peak here, from the data sheets of the same maker. NVLink is given there for
both directions; here is one. Nodes are the DGX ones: 8 GPUs, and for each its own network port of 200 Gbit/s (A100) or
400 Gbit/s. Of each link 80 % is counted on, which is what nccl-tests reaches with large messages. Memory is what the
device has, less 6 % that the context, NCCL's buffers and fragmentation take.

`efficiency` is the part of the peak that matrix products of a training step reach by themselves, without waiting: 0.5,
and 0.6 on A100, whose peak is easier to feed. It is chosen so that an eager step comes out as published: torchtitan's
Llama 3.1 8B on 8 H100, 5,762 tokens/s per GPU, 33 % of the peak (its report benchmarks/llama3_h100_202412; a test holds
this). Fused kernels do better: Megatron-LM's README has 41-48 % on up to 6,144 H100.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

GIGA = 1e9
BF16_TERAFLOPS: Final[dict[str, float]] = {
    "A100": 312,
    "A30": 165,
    "L4": 121,
    "L40S": 362,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200": 989,
    "H200 NVL": 835,
    "GH200": 989,
    "B200": 2250,
    "GB200": 2500,
}
"""Peaks by a part of the name that the driver gives a device; fp16 has the same."""
USABLE_LINK = 0.8
USABLE_MEMORY = 0.94


@dataclass(frozen=True)
class Machine:
    """One rank's device and its links. Rates are per rank, per second."""

    name: str
    flops: float
    """Peak of the device, in the type that trains: dense bf16."""
    fp32_flops: float
    """Peak in fp32, without TF32."""
    efficiency: float
    memory_bytes: float
    memory_bandwidth: float
    """Bytes read or written per second, as elementwise operations reach them."""
    inside: float
    """Bytes per second to ranks of the same worker, in one direction."""
    outside: float
    """Bytes per second to other workers, in one direction."""
    latency: float
    """Seconds until a message of no size has arrived."""
    overlaps: bool
    """Whether FSDP's collectives run beside computation: they have streams of their own on a GPU, not on a CPU."""
    cores: int | None = None
    """A CPU's, which all ranks of a worker share; each rank computes with one thread."""

    def rank_flops(self, compute_bytes: int, ranks_per_worker: int) -> float:
        """Return the peak of one rank."""
        peak = self.flops if compute_bytes == 2 else self.fp32_flops
        return peak * self.share(ranks_per_worker)

    def share(self, ranks_per_worker: int) -> float:
        """Return which part of a device, or core, a rank has."""
        return 1.0 if self.cores is None else min(1.0, self.cores / ranks_per_worker)

    def rank_memory(self, ranks_per_worker: int) -> float:
        """Return the bytes that one rank may use; ranks of a worker share a CPU's memory."""
        return self.memory_bytes if self.cores is None else self.memory_bytes / ranks_per_worker

    def bandwidth(self, degree: int, stride: int, ranks_per_worker: int) -> float:
        """Return the bytes per second of a ring over a group of `degree` ranks that lie `stride` apart.

        A ring enters a worker once for each of the group's ranks in it, through as many network ports.
        """
        within = max(1, min(degree, ranks_per_worker // stride))
        if within == degree:
            return self.inside
        return min(self.inside, within * self.outside)

    def collective_seconds(self, size: float, degree: int, stride: int, ranks_per_worker: int) -> float:
        """Return how long an all-gather or a reduce-scatter of so many bytes takes.

        `size`: of the whole, as it is gathered or before it is scattered. An all-reduce is two of them (Thakur et al.
        2005; Chan et al. 2007). Latencies add up along a tree, not a ring.
        """
        if degree == 1 or size == 0:
            return 0.0
        rate = self.bandwidth(degree, stride, ranks_per_worker) * self.share(ranks_per_worker)
        return size * (degree - 1) / degree / rate + self.latency * math.ceil(math.log2(degree))

    def exchange_seconds(self, size: float, degree: int, stride: int, ranks_per_worker: int) -> float:
        """Return how long an all-to-all takes in which each rank sends `size`, its own part included.

        Across workers all but a small part leaves by the rank's own port.
        """
        if degree == 1 or size == 0:
            return 0.0
        rate = self.inside if degree * stride <= ranks_per_worker else min(self.inside, self.outside)
        moved = size * (degree - 1) / degree
        return moved / (rate * self.share(ranks_per_worker)) + self.latency * math.ceil(math.log2(degree))


def peak_flops(device_name: str) -> float | None:
    """Return a device's dense bf16 peak in FLOP/s by its driver's name, as `NVIDIA H100 80GB HBM3`.

    None where it is unknown: of another device, and of a part of one (MIG).
    """
    words = set(device_name.replace("-", " ").split())
    known = [name for name in BF16_TERAFLOPS if set(name.split()) <= words and "MIG" not in words]
    return BF16_TERAFLOPS[max(known, key=len)] * 1e12 if known else None


def _gpu(name: str, memory: float, bandwidth: float, links: tuple[float, float, float]) -> Machine:
    """Return a node of 8 GPUs: gigabytes, gigabytes/s of memory, fp32 teraflops, gigabytes/s of NVLink and network."""
    fp32_teraflops, nvlink, network = links
    return Machine(
        name=name,
        flops=BF16_TERAFLOPS[name.upper()] * 1e12,
        fp32_flops=fp32_teraflops * 1e12,
        efficiency=0.6 if name == "a100" else 0.5,
        memory_bytes=memory * GIGA * USABLE_MEMORY,
        memory_bandwidth=bandwidth * GIGA * USABLE_LINK,
        inside=nvlink * GIGA * USABLE_LINK,
        outside=network * GIGA * USABLE_LINK,
        latency=15e-6,
        overlaps=True,
    )


CPU: Final = Machine(
    name="cpu",
    flops=250e9,
    fp32_flops=120e9,
    efficiency=0.5,
    memory_bytes=8 * GIGA,
    memory_bandwidth=17 * GIGA,
    inside=0.43 * GIGA,
    outside=0.1 * GIGA,
    latency=190e-6,
    overlaps=False,
    cores=2,
)
"""Two cores of a small virtual machine with gloo, as `benchmarks/plan_vs_measured.py` found it; measure your own."""

MACHINES: Final[dict[str, Machine]] = {
    machine.name: machine
    for machine in (
        _gpu("a100", 85.5, 2039, (19.5, 300, 25)),
        _gpu("h100", 85.5, 3350, (67, 450, 50)),
        _gpu("h200", 150.7, 4800, (67, 450, 50)),
        _gpu("b200", 180.0, 8000, (75, 900, 50)),
        CPU,
    )
}
