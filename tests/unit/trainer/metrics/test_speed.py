"""MFU against the device's peak, and what is known about memory where there is no GPU."""

from __future__ import annotations

import time

import pytest
import torch

from llmtrain_api.planning.machine import BF16_TERAFLOPS, MACHINES, peak_flops
from llmtrain_trainer.metrics.speed import MemoryMeter, device_peak


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 3090", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_the_peak_is_found_by_the_drivers_name(device: str, teraflops: float | None) -> None:
    assert peak_flops(device) == (teraflops and teraflops * 1e12)


def test_plans_and_measurements_use_one_peak() -> None:
    gpus = [machine for machine in MACHINES.values() if machine.cores is None]
    assert gpus and all(machine.flops == BF16_TERAFLOPS[machine.name.upper()] * 1e12 for machine in gpus)


def test_a_cpu_has_no_peak() -> None:
    assert device_peak(torch.device("cpu")) is None


def test_memory_of_a_cpu_is_what_is_resident() -> None:
    meter = MemoryMeter(torch.device("cpu"), watch=True)
    before = meter.read()
    held = torch.ones(16 << 20)
    after = meter.read()
    assert after["peak"] >= after["resident"] >= before["resident"] + held.nbytes // 2
    assert meter.complaint() is None


def test_a_device_that_no_driver_knows_costs_one_complaint() -> None:
    meter = MemoryMeter(torch.device("cuda", 99), watch=True)
    deadline = time.monotonic() + 60
    while (told := meter.complaint()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told and "nvidia-ml-py" in told
    assert meter.complaint() is None
