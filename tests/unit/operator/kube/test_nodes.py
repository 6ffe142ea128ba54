"""What nodes say, as the API tells it."""

from __future__ import annotations

from typing import Any

import pytest

from llmtrain_operator.kube.nodes import hardware, lost


def node(*conditions: tuple[str, str], taints: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "metadata": {"name": "n"},
        "spec": {"taints": [{"key": key, "effect": "NoExecute"} for key in taints]},
        "status": {"conditions": [{"type": kind, "status": status, "reason": "Why"} for kind, status in conditions]},
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(node(("Ready", "True")), "", id="ready"),
        pytest.param(node(("Ready", "False")), "", id="not ready, but its kubelet reports"),
        pytest.param(node(("Ready", "Unknown")), "the node's condition Ready is Unknown (Why)", id="silent kubelet"),
        pytest.param(
            node(("Ready", "True"), taints=("node.kubernetes.io/unreachable",)),
            "the node has the taint node.kubernetes.io/unreachable",
            id="taint",
        ),
        pytest.param(node(taints=("nvidia.com/gpu",)), "", id="somebody's own taint"),
        pytest.param({"metadata": {"name": "n"}}, "", id="nothing known"),
    ],
)
def test_a_node_is_lost(given: dict[str, Any], expected: str) -> None:
    assert lost(given) == expected


@pytest.mark.parametrize(
    ("kind", "status", "bad"),
    [
        pytest.param("Ready", "True", False, id="ready"),
        pytest.param("MemoryPressure", "True", False, id="pressure is the kubelet's business"),
        pytest.param("GpuXidError", "True", True, id="NVSentinel Xid"),
        pytest.param("SysLogsGPUFallenOff", "True", True, id="NVSentinel fallen off the bus"),
        pytest.param("GPUMissing", "True", True, id="node-problem-detector on AKS"),
        pytest.param("IBLinkFlapping", "True", True, id="InfiniBand"),
        pytest.param("XIDHardwareErrors", "False", False, id="watched and well"),
        pytest.param("AcceleratedHardwareReady", "False", True, id="EKS agent, broken"),
        pytest.param("AcceleratedHardwareReady", "True", False, id="EKS agent, well"),
        pytest.param("GpuXidError", "Unknown", False, id="not known"),
    ],
)
def test_a_condition_tells_of_broken_hardware(kind: str, status: str, bad: bool) -> None:
    assert bool(hardware(node((kind, status)))) is bad
