"""What every provider of a test cluster can do, and how one is chosen."""

from pathlib import Path
from typing import Any, Protocol

from llmtrain_kind.archives import Archive
from llmtrain_kind.errors import CannotRunHere
from llmtrain_kind.settings import ClusterSettings

PROVIDERS = ("kind", "local", "current")

#: The name of the control plane where a node's name is asked for.
CONTROL_PLANE = "control-plane"

#: Shown by `status`: there is no registry, so an image is loaded and never pulled.
IMAGE_NOTE = (
    "No registry: images come by `kind/cluster load IMAGE.tar`. Name them localhost/NAME:TAG with "
    "imagePullPolicy IfNotPresent or Never."
)


class Provider(Protocol):
    """One cluster, real or to be. ``lock`` is the descriptor of the cluster's lock, which the caller holds."""

    def up(self, asked: ClusterSettings, recreate: bool, lock: int) -> None:
        """Bring the cluster up as asked; nothing happens if it is so already."""

    def down(self) -> None:
        """Remove the cluster and all it left; nothing happens if there is none."""

    def status(self) -> dict[str, Any]:
        """The facts that `status --json` prints."""

    def load(self, archives: list[Archive]) -> int:
        """Load images into all nodes; the number of imports that were necessary."""

    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""

    def node(self, name: str, verb: str, rate: str, lock: int) -> None:
        """Do something to a node (kill, start, cut, heal, slow) or to the control plane (kill, start)."""

    def pod_pid(self, namespace: str, pod: str, container: str) -> int:
        """The host's pid of PID 1 of a pod's container; the first container if ``container`` is empty."""


def open_provider(name: str, settings: ClusterSettings) -> Provider:
    """The provider called ``name`` for the cluster of these settings."""
    # Imported here: the local provider's modules read Linux-only files.
    if name == "local":
        from llmtrain_kind.provider_local import LocalProvider

        return LocalProvider(settings)
    if name == "kind":
        from llmtrain_kind.provider_kind import KindProvider

        return KindProvider(settings)
    from llmtrain_kind.provider_current import CurrentProvider

    return CurrentProvider(settings)


def choose() -> str:
    """`kind` where Docker answers, else `local` where it can run; raises CannotRunHere with one line."""
    from llmtrain_kind.local.host_check import check
    from llmtrain_kind.provider_kind import docker_answers

    if docker_answers():
        return "kind"
    try:
        check(install=False)
    except CannotRunHere as reason:
        raise CannotRunHere(f"no test cluster can run here: Docker does not answer, and {reason}") from reason
    return "local"
