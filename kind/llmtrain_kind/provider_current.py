"""The `current` provider: a cluster that somebody else runs, reached by the kubeconfig in force at `up`."""

import shutil
from pathlib import Path
from typing import Any

from llmtrain_kind import catalogue, programs
from llmtrain_kind import settings as settings_file
from llmtrain_kind.archives import Archive
from llmtrain_kind.errors import ClusterError, Refused
from llmtrain_kind.kubectl import Kubectl
from llmtrain_kind.settings import ClusterSettings
from llmtrain_kind.shell import run


class CurrentProvider:
    """Somebody else's cluster: we read from it and hand out its kubeconfig, and fault nothing."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl(self.kubeconfig(), self._settings.kubernetes)

    def up(self, asked: ClusterSettings, recreate: bool, lock: int) -> None:
        """Keep a copy of the kubeconfig in force, after a look whether its API server answers."""
        folder = programs.ensure(catalogue.CLIENTS, asked.kubernetes)
        content = run([folder / "kubectl", "config", "view", "--raw", "--flatten", "--minify"])
        settings_file.save(asked)
        path = self._settings.state / "kubeconfig"
        path.touch(mode=0o600)
        path.write_text(content)
        try:
            self._kubectl.run("get", "--raw", "/readyz")
        except ClusterError as error:
            self.down()
            raise ClusterError(f"the cluster of the kubeconfig in force does not answer: {error}") from error

    def down(self) -> None:
        """Forget the cluster; it goes on."""
        shutil.rmtree(self._settings.state, ignore_errors=True)

    def status(self) -> dict[str, Any]:
        """What can be known of a cluster from outside."""
        kubectl = self._kubectl
        return {
            "complete": True,
            "kubeconfig": str(self.kubeconfig()),
            "nodes": kubectl.nodes(),
            "sharedDir": "",
            "sharedDirOnNodes": "",
            "auditLog": "",
            "binDir": str(kubectl.folder),
            "kubernetesVersion": kubectl.server_version(),
            "images": "Images come from a registry that this cluster reaches.",
            "nodePids": {},
        }

    def load(self, archives: list[Archive]) -> int:
        """Refused."""
        raise Refused("provider current: we cannot load images into its nodes; push them to a registry it reaches")

    def kubeconfig(self) -> Path:
        """The copy of the kubeconfig."""
        path = self._settings.state / "kubeconfig"
        if not path.exists():
            raise ClusterError(f"cluster {self._settings.name} is not up: run `kind/cluster up --provider current`")
        return path

    def node(self, name: str, verb: str, rate: str, lock: int) -> None:
        """Refused."""
        raise Refused(f"provider current: `node {name} {verb}` would harm a cluster that is not ours")

    def pod_pid(self, namespace: str, pod: str, container: str) -> int:
        """Refused."""
        raise Refused("provider current: the processes of its pods are on other machines")
