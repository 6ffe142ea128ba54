"""The API server, as coroutines over plain dicts.

Wraps the official client's transport (TLS, kubeconfig, token renewal) and none of its models, which drop fields they do
not know. The client blocks, so each call runs in a small pool of threads: never on the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import urllib3
from kubernetes import client as official
from kubernetes import config as official_config

from llmtrain_api.constants import MANAGER
from llmtrain_operator.kube.errors import UnreachableError, error_for
from llmtrain_operator.kube.resources import Resource
from llmtrain_operator.kube.wire import apply_body

CONNECT_SECONDS = 3.0
READ_SECONDS = 15.0
LIST_CHUNK = 500
THREADS = 16
# The official client writes the body of the bare type as ASCII JSON, which is not always YAML; with a charset it lets
# the bytes of `apply_body` through as they are.
APPLY = "application/apply-patch+yaml; charset=utf-8"
MERGE = "application/merge-patch+json"

Object = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One request."""

    verb: str
    """As RBAC says it: get, list, create, update, patch, delete."""
    resource: Resource
    namespace: str | None
    name: str = ""
    subresource: str = ""
    query: tuple[tuple[str, str], ...] = ()
    body: Object | None = None
    content_type: str = "application/json"
    read_seconds: float = READ_SECONDS


@dataclass(frozen=True)
class DeleteOptions:
    uid: str = ""
    """Delete this very object; another one of the same name is a ConflictError."""
    grace_seconds: float | None = None
    """None: the object's own."""
    propagation: str = "Background"


Observer = Callable[[Call, int], None]
"""Is told each call and its HTTP status (0: no answer)."""

_METHODS = {"get": "GET", "list": "GET", "create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}


def load_configuration(kubeconfig: str | None = None) -> official.Configuration:
    """Return the connection settings: of the pod's service account, else of the kubeconfig in force.

    Raises:
        kubernetes.config.ConfigException: there is neither.
    """
    configuration = official.Configuration()
    if kubeconfig is None:
        try:
            official_config.load_incluster_config(client_configuration=configuration)
        except official_config.ConfigException:
            official_config.load_kube_config(client_configuration=configuration)
    else:
        official_config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    configuration.connection_pool_maxsize = THREADS
    # Retrying is the work queue's business; a silent retry here would hide what happened from it.
    configuration.retries = False
    return configuration


class KubeClient:
    """Requests to one API server. Every method may raise an ApiError."""

    def __init__(self, configuration: official.Configuration, observer: Observer | None = None) -> None:
        self._api = official.ApiClient(configuration)
        self._observer = observer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kube")

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return the object as the API server has it now."""
        return await self._ask(Call("get", resource, namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None, label_selector: str = ""
    ) -> tuple[list[Object], str]:
        """Return all objects (of all namespaces with None) and the version of the list."""
        items: list[Object] = []
        token = ""
        while True:
            query = [("limit", str(LIST_CHUNK))]
            query += [("labelSelector", label_selector)] if label_selector else []
            query += [("continue", token)] if token else []
            page = await self._ask(Call("list", resource, namespace, query=tuple(query)))
            items += page.get("items") or []
            token = page["metadata"].get("continue") or ""
            if not token:
                return items, str(page["metadata"].get("resourceVersion", ""))

    async def create(self, resource: Resource, body: Object) -> Object:
        """Create the object; ConflictError where its name is taken."""
        namespace = body["metadata"]["namespace"]
        return await self._ask(Call("create", resource, namespace, query=(("fieldManager", MANAGER),), body=body))

    async def update(self, resource: Resource, body: Object) -> Object:
        """Replace the object; ConflictError where its resourceVersion is not the newest."""
        metadata = body["metadata"]
        return await self._ask(Call("update", resource, metadata["namespace"], metadata["name"], body=body))

    async def apply(self, resource: Resource, body: Object, *, manager: str = MANAGER, subresource: str = "") -> Object:
        """Server-side apply: own every field in `body`, and remove those that this manager applied before and are not.

        A resourceVersion in the metadata is a precondition: ConflictError where it is not the newest.
        """
        metadata = body["metadata"]
        call = Call(
            "patch",
            resource,
            metadata["namespace"],
            metadata["name"],
            subresource,
            query=(("fieldManager", manager), ("force", "true")),
            body=body,
            content_type=APPLY,
        )
        return await self._ask(call)

    async def merge(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        """Merge-patch the object."""
        return await self._ask(Call("patch", resource, namespace, name, body=body, content_type=MERGE))

    async def delete(self, resource: Resource, namespace: str, name: str, options: DeleteOptions) -> Object:
        """Delete the object; the answer is its last state, or a Status."""
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": options.propagation,
        }
        if options.grace_seconds is not None:
            body["gracePeriodSeconds"] = int(options.grace_seconds)
        if options.uid:
            body["preconditions"] = {"uid": options.uid}
        return await self._ask(Call("delete", resource, namespace, name, body=body))

    def close(self) -> None:
        """Give the threads back; calls under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, call: Call) -> Object:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._send, call)

    def _send(self, call: Call) -> Object:
        path = call.resource.path(call.namespace, call.name, call.subresource)
        try:
            response, status, _ = self._api.call_api(
                path,
                _METHODS[call.verb],
                query_params=list(call.query),
                header_params={"Accept": "application/json", "Content-Type": call.content_type},
                body=apply_body(call.body or {}) if call.content_type == APPLY else call.body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=(CONNECT_SECONDS, call.read_seconds),
            )
            data = response.data
        except official.ApiException as error:
            self._observe(call, error.status or 0)
            raise error_for(error.status or 0, _message(call, error), _retry_after(error)) from error
        except urllib3.exceptions.HTTPError as error:
            self._observe(call, 0)
            raise UnreachableError(f"{call.verb} {path}: no answer: {error}") from error
        self._observe(call, status)
        return _object(call, data)

    def _observe(self, call: Call, status: int) -> None:
        if self._observer is not None:
            self._observer(call, status)


def _object(call: Call, data: bytes) -> Object:
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise UnreachableError(f"{call.verb} {call.resource.plural}: the answer is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UnreachableError(f"{call.verb} {call.resource.plural}: the answer is no object")
    return parsed


def _status_body(error: official.ApiException) -> Mapping[str, Any]:
    try:
        body = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _message(call: Call, error: official.ApiException) -> str:
    """Return what the API server said; that text names field, value and what is allowed."""
    said = _status_body(error).get("message") or error.reason or "no reason given"
    target = f"{call.resource.plural}/{call.subresource}" if call.subresource else call.resource.plural
    return f"{call.verb} {target} {call.name or (call.body or {}).get('metadata', {}).get('name', '')}: {said}"


def _retry_after(error: official.ApiException) -> float | None:
    """Return the seconds of the Retry-After header, or of the older place in the body."""
    header = error.headers.get("Retry-After") if error.headers else None
    asked = header if header is not None else (_status_body(error).get("details") or {}).get("retryAfterSeconds")
    try:
        return max(float(asked), 0.0) if asked is not None else None
    except (TypeError, ValueError):
        return None
