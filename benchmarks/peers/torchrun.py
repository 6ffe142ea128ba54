"""torchrun (elastic, c10d) as a platform engineer would run it: a StatefulSet of pods with our image and trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtrain_kind.driver import TRAINER_IMAGE

NAME = "torchrun"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def objects(namespace: str, spec: dict[str, Any], claim: str) -> list[dict[str, Any]]:
    """Return the Service, ConfigMap and StatefulSet. The pods restart their containers and rejoin by rendezvous."""
    script = (Path(__file__).parent / "torchrun_rank.py").read_text()
    meta = {"name": NAME, "namespace": namespace}
    labels = {"app": NAME}
    replicas, ranks = spec["workers"]["replicas"], spec["workers"]["ranksPerWorker"]
    command = [
        *("python3", "-m", "torch.distributed.run", f"--nnodes={replicas}", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={NAME}-0.{NAME}:29400", "--rdzv-id=bench", "--max-restarts=100"),
        "/bench/torchrun_rank.py",
    ]
    environment = {
        "SPEC_FILE": "/bench/spec.json",
        # Without it a restart on gloo hangs or crashes: the old store still holds the dead ranks' addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    container = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "securityContext": RESTRICTED,
        "volumeMounts": [
            {"name": "bench", "mountPath": "/bench"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "store", "mountPath": f"/mnt/llmtrain/{claim}"},
        ],
    }
    pod_spec = _pod_spec(labels, container, claim)
    stateful_set = {
        "replicas": replicas,
        "podManagementPolicy": "Parallel",
        "serviceName": NAME,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod_spec},
    }
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    data = {"torchrun_rank.py": script, "spec.json": json.dumps(spec)}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": stateful_set},
    ]


def _pod_spec(labels: dict[str, str], container: dict[str, Any], claim: str) -> dict[str, Any]:
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    return {
        "terminationGracePeriodSeconds": 10,
        "topologySpreadConstraints": [spread],
        "containers": [container],
        "volumes": [
            {"name": "bench", "configMap": {"name": NAME}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "store", "persistentVolumeClaim": {"claimName": claim}},
        ],
    }
