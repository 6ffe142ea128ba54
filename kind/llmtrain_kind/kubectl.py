"""Questions to a cluster by kubectl: for the providers whose API server we did not start ourselves."""

import json
from pathlib import Path
from typing import Any

from llmtrain_kind import catalogue, programs
from llmtrain_kind.shell import run


class Kubectl:
    """kubectl for one kubeconfig."""

    def __init__(self, kubeconfig: Path, kubernetes: str) -> None:
        self.folder = programs.ensure(catalogue.CLIENTS, kubernetes)
        self._command: list[str | Path] = [self.folder / "kubectl", "--kubeconfig", kubeconfig, "--request-timeout=10s"]

    def run(self, *arguments: str) -> str:
        """The output of a kubectl command; raises ClusterError when it fails."""
        return run([*self._command, *arguments])

    def read(self, *arguments: str) -> Any:
        """The parsed output of ``kubectl get ... -o json``."""
        return json.loads(self.run("get", *arguments, "-o", "json"))

    def server_version(self) -> str:
        """The version of the API server, without the v."""
        answer = json.loads(self.run("version", "-o", "json"))
        return str(answer["serverVersion"]["gitVersion"]).removeprefix("v")

    def nodes(self) -> list[dict[str, Any]]:
        """Name and readiness of every node that is no control plane."""
        found = []
        for node in self.read("nodes")["items"]:
            if "node-role.kubernetes.io/control-plane" in node["metadata"].get("labels", {}):
                continue
            conditions = {entry["type"]: entry["status"] for entry in node["status"].get("conditions", [])}
            found.append({"name": node["metadata"]["name"], "ready": conditions.get("Ready") == "True"})
        return found
