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
from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.config import RunConfig

SAMPLE_SECONDS = 1.0
PAGE = resource.getpagesize()
STATM = Path("/proc/self/statm")


class Utilization:
    """The part of all ranks' peak that a run uses."""

    def __init__(self, config: RunConfig) -> None:
        exact = config.spec.training.precision == "fp32"
        alone = None if exact else peak_speed(config.dimensions, config.device)
        self._peak_speed = None if alone is None else alone * config.launch.world_size

    def of(self, tokens_per_second: float) -> float | None:
        """Return it, 0 to 1; None where no peak is known, or compute is fp32."""
        return None if self._peak_speed is None else tokens_per_second / self._peak_speed


def peak_speed(dims: ModelDimensions, device: torch.device) -> float | None:
    """Return the tokens per second at which a model would use a device's whole peak; None where that is unknown."""
    peak = device_peak(device)
    return None if peak is None else peak / (3 * dims.flops_per_token())


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
            # The kernel brings it up to date now and then.
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
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
