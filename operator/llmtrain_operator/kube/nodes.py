"""What a node says about the workers on it: whether it is gone, and whether a device of it is broken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Object = Mapping[str, Any]

BAD_WHEN_TRUE = re.compile(
    r"gpu|xid|nvlink|nvswitch|dcgm|infiniband|^ib|rdma|pcie|ecc|thermal|hardware|kerneldeadlock|readonlyfilesystem",
    re.I,
)
"""Conditions that report a trouble while they are True, by their type: node-problem-detector and its cloud variants
(GPUMissing, XIDHardwareErrors, NVLinkStatusInactive, IBLinkFlapping ...), NVSentinel (GpuXidError, GpuNvlinkWatch,
SysLogsGPUFallenOff ...), DCGM exporters."""
BAD_WHEN_FALSE = re.compile(r"^(acceleratedhardware|gpu|networking|accelerator)\w*(ready|healthy)$", re.I)
"""Conditions that report a trouble while they are False: the EKS node monitoring agent's AcceleratedHardwareReady."""
UNREACHABLE_TAINTS = frozenset({"node.kubernetes.io/unreachable", "node.cloudprovider.kubernetes.io/shutdown"})


def lost(node: Object) -> str:
    """Return why the node counts as gone; empty while its kubelet reports."""
    ready = next((c for c in _conditions(node) if c.get("type") == "Ready"), {})
    if ready.get("status") == "Unknown":
        return f"the node's condition Ready is Unknown ({ready.get('reason') or 'no reason given'})"
    taints = {taint.get("key") for taint in (node.get("spec") or {}).get("taints") or []}
    if found := sorted(taint for taint in taints & UNREACHABLE_TAINTS if taint):
        return f"the node has the taint {found[0]}"
    return ""


def hardware(node: Object) -> str:
    """Return what the node reports about broken devices, one condition after the other; empty where all is well."""
    return "; ".join(_shown(condition) for condition in _conditions(node) if _is_bad(condition))


def _is_bad(condition: Object) -> bool:
    kind, status = str(condition.get("type") or ""), condition.get("status")
    if BAD_WHEN_FALSE.search(kind):
        return status == "False"
    return status == "True" and bool(BAD_WHEN_TRUE.search(kind))


def _shown(condition: Object) -> str:
    said = condition.get("message") or condition.get("reason")
    return f"{condition.get('type')}: {said}" if said else str(condition.get("type"))


def _conditions(node: Object) -> list[Object]:
    conditions = (node.get("status") or {}).get("conditions")
    return [c for c in conditions if isinstance(c, Mapping)] if isinstance(conditions, list) else []
