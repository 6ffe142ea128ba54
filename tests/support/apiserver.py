"""A small API server that exists to misbehave: faults are injected here, everything else is shown on a real cluster.

It keeps objects, versions and watches, applies by manager (a field that a manager stops applying goes), and does what
the API server does with preconditions, subresources, generations, graceful deletion and owner references. No schema.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from llmtrain_operator.kube.resources import EVENTS, JOBS, LEASES, NODES, PODS, SECRETS, Resource
from tests.support.bodies import parsed
from tests.support.merging import Object, merged, minus, without

RESOURCES = {resource.plural: resource for resource in (JOBS, PODS, NODES, SECRETS, EVENTS, LEASES)}
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
DEFINITIONS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition")
WRITES = frozenset({"create", "update", "patch", "delete"})


@dataclass(frozen=True)
class Request:
    """One request as the authorizer of a real API server would see it."""

    verb: str
    group: str
    resource: str
    """With the subresource: llmtrainjobs/status."""
    namespace: str | None
    name: str
    query: tuple[tuple[str, str], ...] = ()


@dataclass
class Fault:
    """What is done to the requests that fit, as long as `times` lasts.

    kind: a status code, `drop` (connection closed, nothing done), `lost` (done, but the answer never arrives) or
    `hang` (no answer until `released`).
    """

    fits: Callable[[Request], bool]
    kind: int | str
    times: int = 1
    retry_after: float | None = None
    hits: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)


class _StatusError(Exception):
    def __init__(self, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.retry_after = code, reason, retry_after


class FakeApiServer:
    """Listens on a port of this machine."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._objects: dict[str, dict[tuple[str, str], Object]] = {plural: {} for plural in RESOURCES}
        self._applied: dict[tuple[str, str, str], Object] = {}
        """(uid, subresource, manager) to what that manager applied last."""
        self._log: dict[str, list[tuple[int, str, Object]]] = {plural: [] for plural in RESOURCES}
        self._compacted = 0
        self._versions = itertools.count(1)
        self._version = 0
        self._news = asyncio.Condition()
        self._watchers: set[asyncio.Task[Any]] = set()
        self._port = 0
        self._runner: web.AppRunner | None = None

    # ---- the test's side

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen; on the same port as before after a `stop`."""
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """An outage: objects stay, connections end."""
        for fault in self.faults:
            fault.released.set()
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    def inject(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def objects(self, resource: Resource) -> list[Object]:
        return [copy.deepcopy(obj) for obj in self._objects[resource.plural].values()]

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        return copy.deepcopy(self._objects[resource.plural].get((namespace, name)))

    def writes(self) -> list[Request]:
        """All writes so far, but for the lease's."""
        return [r for r in self.requests if r.verb in WRITES and r.resource != LEASES.plural]

    async def put(self, resource: Resource, obj: Object) -> Object:
        """Create or replace an object as somebody else would; missing metadata is filled in."""
        metadata = obj["metadata"]
        key = (metadata["namespace"], metadata["name"])
        known = self._objects[resource.plural].get(key)
        if known is None:
            return await self._store(resource, self._new(resource, obj))
        kept = {name: known["metadata"][name] for name in ("uid", "creationTimestamp", "generation")}
        return await self._store(resource, {**obj, "metadata": {**metadata, **kept}}, known)

    async def change(self, resource: Resource, namespace: str, name: str, change: Callable[[Object], None]) -> Object:
        """Change an object in place."""
        known = self._objects[resource.plural][namespace, name]
        changed = copy.deepcopy(known)
        change(changed)
        return await self._store(resource, changed, known)

    async def remove(self, resource: Resource, namespace: str, name: str, *, silently: bool = False) -> None:
        """Delete at once, with what it owns. Silently: no watch will ever tell (as where a watch had to start over)."""
        await self._remove(resource, self._objects[resource.plural][namespace, name], silently)

    def end_watches(self) -> None:
        """Close the connections of all watches."""
        for task in list(self._watchers):
            task.cancel()

    async def compact(self) -> None:
        """Forget the history: every watch that goes on from before gets 410 Gone, those under way at once."""
        async with self._news:
            self._compacted = self._version
            for log in self._log.values():
                log.clear()
            self._news.notify_all()
        self.end_watches()

    async def tell_error(self, resource: Resource) -> None:
        """Send the watches an error that is not 410: kopf dies of it."""
        await self._tell(resource, "ERROR", {"kind": "Status", "code": 500, "message": "injected", "metadata": {}})

    # ---- HTTP

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        parts = [part for part in http.path.split("/") if part]
        if len(parts) <= 3 and not (len(parts) == 3 and parts[0] == "api"):
            return web.json_response(_discovery(parts))
        request, resource = _parse(http, parts)
        self.requests.append(request)
        try:
            lost = await self._fault(http, request)
            if request.verb == "watch":
                return await self._watch(http, request, resource)
            answer, status = await self._answer(http, request, resource)
            if lost:
                raise ConnectionResetError
            return web.json_response(answer, status=status)
        except _StatusError as error:
            return _refusal(error)
        except ConnectionResetError:
            if http.transport is not None:
                http.transport.abort()
            return web.Response()

    async def _fault(self, http: web.Request, request: Request) -> bool:
        fault = next((f for f in self.faults if f.hits < f.times and f.fits(request)), None)
        if fault is None:
            return False
        fault.hits += 1
        if fault.kind == "hang":
            await fault.released.wait()
        if fault.kind in ("drop", "hang"):
            raise ConnectionResetError
        if isinstance(fault.kind, int):
            raise _StatusError(fault.kind, "Injected", "a fault was injected", fault.retry_after)
        return fault.kind == "lost"

    async def _answer(self, http: web.Request, request: Request, resource: Resource) -> tuple[Object, int]:
        if request.verb == "list":
            return self._list(request, resource), 200
        body = parsed(await http.read(), http.content_type)
        known = self._objects[resource.plural].get((request.namespace or "", request.name))
        if request.verb == "create":
            return await self._create(resource, body), 201
        if request.verb == "patch" and http.content_type == "application/apply-patch+yaml":
            return await self._apply(request, resource, known, body), 200
        if known is None:
            raise _StatusError(404, "NotFound", f'{resource.plural} "{request.name}" not found')
        if request.verb == "get":
            return known, 200
        if request.verb == "delete":
            return await self._delete(resource, known, body), 200
        if request.verb == "update":
            _check(known, body["metadata"])
            return await self._store(resource, {**body, "metadata": {**known["metadata"]}}, known), 200
        return await self._store(resource, merged(known, body), known), 200

    def _list(self, request: Request, resource: Resource) -> Object:
        items = [obj for obj in self._objects[resource.plural].values() if _selected(obj, request)]
        metadata = {"resourceVersion": str(self._version)}
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": items,
        }

    async def _watch(self, http: web.Request, request: Request, resource: Resource) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(http)
        task = asyncio.ensure_future(self._stream(response, request, resource))
        self._watchers.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                task.cancel()
                raise
        finally:
            self._watchers.discard(task)
        return response

    async def _stream(self, response: web.StreamResponse, request: Request, resource: Resource) -> None:
        since = int(dict(request.query).get("resourceVersion") or 0)
        async for kind, obj in self._events(resource, since):
            if kind == "ERROR" or _selected(obj, request):
                await response.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")

    async def _events(self, resource: Resource, since: int) -> AsyncIterator[tuple[str, Object]]:
        while True:
            if since < self._compacted:
                yield "ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                return
            for version, kind, obj in [entry for entry in self._log[resource.plural] if entry[0] > since]:
                yield kind, obj
                since = version
            async with self._news:
                if not any(entry[0] > since for entry in self._log[resource.plural]) and since >= self._compacted:
                    await self._news.wait()

    # ---- objects

    def _new(self, resource: Resource, obj: Object) -> Object:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        filled = {"uid": str(uuid.uuid4()), "creationTimestamp": stamp, "generation": 1}
        new = copy.deepcopy(obj)
        new["metadata"] = {**filled, **new["metadata"]}
        if resource is PODS:
            new.setdefault("status", {"phase": "Pending"})
        return {"apiVersion": resource.api_version, "kind": resource.kind, **new}

    async def _create(self, resource: Resource, body: Object) -> Object:
        if (body["metadata"]["namespace"], body["metadata"]["name"]) in self._objects[resource.plural]:
            raise _StatusError(409, "AlreadyExists", f'{resource.plural} "{body["metadata"]["name"]}" already exists')
        return await self._store(resource, self._new(resource, body))

    async def _apply(self, request: Request, resource: Resource, known: Object | None, body: Object) -> Object:
        _, _, subresource = request.resource.partition("/")
        if known is None:
            if subresource or body["metadata"].get("uid"):
                raise _StatusError(404, "NotFound", f'{resource.plural} "{request.name}" not found')
            self.requests.append(replace(request, verb="create"))  # the authorizer is asked for this too
            known = self._new(resource, {"metadata": {"namespace": request.namespace, "name": request.name}})
        _check(known, body["metadata"])
        part = {"status": body.get("status", {})} if subresource == "status" else without(body, "status")
        part.pop("metadata", None) if subresource else part.get("metadata", {}).pop("resourceVersion", None)
        memory = (known["metadata"]["uid"], subresource, dict(request.query)["fieldManager"])
        changed = merged(minus(known, self._applied.get(memory, {}), part), part)
        self._applied[memory] = copy.deepcopy(part)
        if changed == known and (request.namespace or "", request.name) in self._objects[resource.plural]:
            return known
        return await self._store(resource, changed, known)

    async def _delete(self, resource: Resource, known: Object, options: Object) -> Object:
        uid = (options.get("preconditions") or {}).get("uid")
        if uid and uid != known["metadata"]["uid"]:
            raise _StatusError(409, "Conflict", "the UID in the precondition is not that of the object")
        placed = bool(known.get("spec", {}).get("nodeName"))
        if resource is PODS and placed and options.get("gracePeriodSeconds") != 0:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            metadata = {**known["metadata"], "deletionTimestamp": known["metadata"].get("deletionTimestamp") or stamp}
            return await self._store(resource, {**known, "metadata": metadata}, known)
        await self._remove(resource, known, silently=False)
        return known

    async def _store(self, resource: Resource, obj: Object, known: Object | None = None) -> Object:
        obj = copy.deepcopy(obj)
        if known is not None and obj.get("spec") != known.get("spec"):
            obj["metadata"]["generation"] = known["metadata"].get("generation", 1) + 1
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        kind = "MODIFIED" if key in self._objects[resource.plural] else "ADDED"
        self._version = next(self._versions)
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._objects[resource.plural][key] = obj
        await self._tell(resource, kind, obj)
        return obj

    async def _remove(self, resource: Resource, obj: Object, silently: bool) -> None:
        del self._objects[resource.plural][obj["metadata"]["namespace"], obj["metadata"]["name"]]
        self._version = next(self._versions)
        last = copy.deepcopy(obj)
        last["metadata"]["resourceVersion"] = str(self._version)
        if not silently:
            await self._tell(resource, "DELETED", last)
        for plural, owned in self._objects.items():
            for child in list(owned.values()):
                owners = child["metadata"].get("ownerReferences") or []
                if any(owner["uid"] == obj["metadata"]["uid"] for owner in owners):
                    await self._remove(RESOURCES[plural], child, silently)

    async def _tell(self, resource: Resource, kind: str, obj: Object) -> None:
        async with self._news:
            self._version = max(self._version, next(self._versions)) if kind == "ERROR" else self._version
            self._log[resource.plural].append((self._version, kind, copy.deepcopy(obj)))
            self._news.notify_all()


def _parse(http: web.Request, parts: list[str]) -> tuple[Request, Resource]:
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    namespace = None
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = [*rest, "", ""][:3]
    query = tuple(http.query.items())
    verbs = {"GET": "get" if name else "list", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    verb = "watch" if ("watch", "true") in query else verbs[http.method]
    target = f"{plural}/{subresource}" if subresource else plural
    return Request(verb, group, target, namespace, name, query), RESOURCES[plural]


def _discovery(parts: list[str]) -> Object:
    """kopf waits for ever unless it finds namespaces and definitions, although it is told not to read them."""
    known = [*RESOURCES.values(), NAMESPACES, DEFINITIONS]
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        groups = {r.group: {"groupVersion": r.api_version, "version": r.version} for r in known if r.group}
        return {
            "kind": "APIGroupList",
            "groups": [{"name": group, "versions": [v], "preferredVersion": v} for group, v in groups.items()],
        }
    group = "" if parts[0] == "api" else parts[1]
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    entries = [
        {"name": r.plural, "singularName": r.kind.lower(), "kind": r.kind, "namespaced": True, "verbs": verbs}
        for r in known
        if r.group == group
    ]
    return {"kind": "APIResourceList", "resources": entries}


def _selected(obj: Object, request: Request) -> bool:
    if request.namespace is not None and obj["metadata"]["namespace"] != request.namespace:
        return False
    selector = dict(request.query).get("labelSelector", "")
    return not selector or selector in (obj["metadata"].get("labels") or {})


def _check(known: Object, metadata: Object) -> None:
    for name in ("uid", "resourceVersion"):
        if metadata.get(name) and metadata[name] != known["metadata"].get(name):
            raise _StatusError(409, "Conflict", f"the object has been modified: its {name} is another")


def _refusal(error: _StatusError) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "reason": error.reason, "code": error.code, "message": str(error)}
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    return web.json_response(body, status=error.code, headers=headers)


@contextlib.asynccontextmanager
async def fake_api_server() -> AsyncIterator[FakeApiServer]:
    """A server that listens for the time of the block."""
    server = FakeApiServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
