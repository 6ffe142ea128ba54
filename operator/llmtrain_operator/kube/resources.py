"""The kinds of objects the operator touches, and their paths in the API."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from llmtrain_api.constants import GROUP, KIND, PLURAL, VERSION


@dataclass(frozen=True)
class Resource:
    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the path of one object, or of all in a namespace, or (namespace None) of all."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/" + "/".join(quote(part, safe="") for part in parts)


JOBS = Resource(GROUP, VERSION, PLURAL, KIND)
PODS = Resource("", "v1", "pods", "Pod")
NODES = Resource("", "v1", "nodes", "Node")
SECRETS = Resource("", "v1", "secrets", "Secret")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
