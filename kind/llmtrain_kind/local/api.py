"""A small client of the cluster's API server: JSON over HTTPS with the administrator's certificate.

kubectl would do, but a process of 60 MB per question makes waiting slow.
"""

import http.client
import json
import ssl
from typing import Any

from llmtrain_kind.errors import ClusterError
from llmtrain_kind.local.layout import Layout


class ApiUnavailable(ClusterError):
    """The API server could not be reached or gave no usable answer."""


class ApiError(ClusterError):
    """The API server refused; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Requests to one cluster. Not for several threads at once."""

    def __init__(self, layout: Layout, timeout_seconds: float = 10) -> None:
        context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        context.load_cert_chain(str(layout.pki / "admin.crt"), str(layout.pki / "admin.key"))
        self._connection = http.client.HTTPSConnection(
            layout.bridge_address, 6443, context=context, timeout=timeout_seconds
        )

    def get(self, path: str) -> Any:
        """GET ``path``; the parsed answer. Raises ApiUnavailable or ApiError."""
        return self._request("GET", path)

    def merge(self, path: str, patch: dict[str, Any]) -> Any:
        """PATCH ``path`` by a JSON merge patch."""
        return self._request("PATCH", path, patch, "application/merge-patch+json")

    def strategic_merge(self, path: str, patch: dict[str, Any]) -> Any:
        """PATCH ``path`` by a strategic merge patch: lists are merged by their items' keys."""
        return self._request("PATCH", path, patch, "application/strategic-merge-patch+json")

    def apply(self, path: str, manifest: dict[str, Any]) -> Any:
        """Server-side apply of ``manifest`` at ``path``: creates or updates."""
        query = "?fieldManager=llmtrain-kind&force=true"
        return self._request("PATCH", path + query, manifest, "application/apply-patch+yaml")

    def ready(self) -> bool:
        """Whether the API server says that it is ready."""
        try:
            self._request("GET", "/readyz")
        except (ApiUnavailable, ApiError):
            return False
        return True

    def exists(self, path: str) -> bool:
        """Whether there is an object at ``path``."""
        try:
            self.get(path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def _request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        headers = {"Accept": "application/json", "Content-Type": kind}
        try:
            self._connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ApiUnavailable(f"API server: {method} {path}: {error}") from error
        if answer.status >= 300:
            raise ApiError(answer.status, f"API server: {method} {path}: {answer.status} {text[:500].decode()}")
        return json.loads(text) if text.startswith(b"{") else text.decode()
