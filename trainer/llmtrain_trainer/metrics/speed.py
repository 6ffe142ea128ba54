"""How much of the hardware is used: model FLOPs utilization, and memory.

Model FLOPs are those of the model's matrices and causal attention, backward counted twice forward; what recomputation
repeats does not count (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import torch

from llmtrain_api.planning.machine import peak_flops
from llmtrain_trainer.config import RunConfig

SAMPLE_SECONDS = 1.0
PAGE = resource.getpagesize()
STATM = Path("/proc/self/statm")


def utilization(config: RunConfig, tokens_per_second: float) -> float | None:
    """Return the part of all ranks' peak that is used, 0 to 1; None where no peak is known, or compute is fp32."""
    peak = device_peak(config.device) if config.spec.training.precision != "fp32" else None
    if peak is None:
        return None
    return 3 * config.dimensions.flops_per_token() * tokens_per_second / (peak * config.launch.world_size)


def device_peak(device: torch.device) -> float | None:
    """Return the dense bf16 (and fp16) peak of a device in FLOP/s; None of a CPU and of a GPU that is not listed."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


class MemoryMeter:
    """What this rank holds. On a GPU, where asked, a thread reads the use of the whole device every second (NVML)."""

    def __init__(self, device: torch.device, *, watch: bool) -> None:
        self._device = device
        self._used: int | None = None
        self._complaint: str | None = None
        if device.type == "cuda" and watch:
            threading.Thread(target=self._watch, name="nvml", daemon=True).start()

    def read(self) -> dict[str, int]:
        """Return bytes by kind: see StepRecord.memory."""
        if self._device.type != "cuda":
            resident = int(STATM.read_bytes().split()[1]) * PAGE
            peak = (
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            )  # the kernel brings it up to date now and then
            return {"resident": resident, "peak": max(peak, resident)}
        held = torch.cuda.memory_stats(self._device)
        found = {
            "allocated": int(held["allocated_bytes.all.current"]),
            "reserved": int(held["reserved_bytes.all.current"]),
            "peak": int(held["allocated_bytes.all.peak"]),
        }
        return found if self._used is None else {**found, "device_used": self._used}

    def complaint(self) -> str | None:
        """Return why the whole device's use is not known, where that has not been returned before."""
        told, self._complaint = self._complaint, None
        return told

    def _watch(self) -> None:
        pause = threading.Event()
        try:
            while True:
                self._used = torch.cuda.device_memory_used(self._device)
                pause.wait(SAMPLE_SECONDS)
        except Exception as error:  # the package or the driver's library is missing, or the device is a part of one
            self._used = None
            self._complaint = f"{type(error).__name__}: {error}; fix: install the package nvidia-ml-py in the image"
