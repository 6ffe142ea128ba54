"""The coordinator's HTTP face: checks who asks and what, and hands the rest to the hub."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from pydantic import ValidationError

from llmtrain_api.sync import MAX_BODY_BYTES, SYNC_PATH, SyncError, SyncRequest
from llmtrain_operator.coordinator.hub import Hub, SyncRefusedError
from llmtrain_operator.coordinator.token import token_matches
from llmtrain_operator.runtime.backend import JobKey

logger = logging.getLogger(__name__)

MAX_ERRORS_SHOWN = 5
TOKEN_FIX = "send `Authorization: Bearer TOKEN` with the token of this job, from its secret"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CoordinatorServer:
    """Serves the agents' sync requests on one address."""

    def __init__(
        self,
        hub: Hub,
        key: bytes,
        host: str,
        port: int,
        on_wrong_token: Callable[[JobKey], None] = lambda key: None,
        on_refused: Callable[[int], None] = lambda status: None,
    ) -> None:
        """`key` makes the jobs' tokens; port 0 takes a free one (see `port` after start).

        `on_wrong_token` is told of each request for a known job whose token is not that job's, `on_refused` of the
        HTTP status of every refusal.
        """
        self._on_refused = on_refused
        self._on_wrong_token = on_wrong_token
        self._hub = hub
        self._key = key
        self._host = host
        self._port = port
        # Without handler_cancellation an agent that hung up would go on being "connected" until its hold ends.
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, reuse_address=True).start()

    async def stop(self) -> None:
        """End every held request at once, then close."""
        self._hub.close()
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port in use, once started."""
        return int(self._runner.addresses[0][1])

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._count_refusals, _refusals_as_json])
        app.router.add_post(SYNC_PATH, self._sync)
        return app

    @web.middleware
    async def _count_refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if response.status >= 400:
            self._on_refused(response.status)
        return response

    async def _sync(self, request: web.Request) -> web.Response:
        key = JobKey(request.match_info["namespace"], request.match_info["name"])
        self._authorize(request, key)
        report = await _read_report(request)
        response = await self._hub.sync(key, request.match_info["pod"], report)
        return web.json_response(text=response.model_dump_json(by_alias=True, exclude_none=True))

    def _authorize(self, request: web.Request, key: JobKey) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise SyncRefusedError(401, "the request has no bearer token", TOKEN_FIX)
        uid = self._hub.uid_of(key)
        if uid is None:
            raise SyncRefusedError(404, f"job {key} is not known here", "ask again; it may be new, or deleted")
        if not token_matches(self._key, uid, token.strip()):
            self._on_wrong_token(key)
            raise SyncRefusedError(403, f"the token is not that of job {key} as it exists now", TOKEN_FIX)


async def _read_report(request: web.Request) -> SyncRequest:
    """Return the parsed body.

    Raises:
        SyncRefusedError: 400, naming each field that is wrong.
        web.HTTPRequestEntityTooLarge: the body is over MAX_BODY_BYTES.
    """
    body = await request.read()
    try:
        return SyncRequest.model_validate_json(body)
    except ValidationError as error:
        raise SyncRefusedError(400, _describe(error), "send a SyncRequest as llmtrain_api.sync describes it") from error


def _describe(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False)
    lines = []
    for problem in problems[:MAX_ERRORS_SHOWN]:
        field = ".".join(str(part) for part in problem["loc"]) or "body"
        lines.append(f"{field}: {problem['msg']} (got {ascii(problem['input'])[:80]})")
    if len(problems) > MAX_ERRORS_SHOWN:
        lines.append(f"and {len(problems) - MAX_ERRORS_SHOWN} more")
    return "; ".join(lines)


@web.middleware
async def _refusals_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every refusal, expected or not, into a SyncError body: an agent always gets something it can log."""
    try:
        return await handler(request)
    except SyncRefusedError as refused:
        return _refusal(refused.status, refused.error, refused.fix)
    except web.HTTPRequestEntityTooLarge:
        return _refusal(413, f"the body is over {MAX_BODY_BYTES} bytes", "send shorter error texts")
    except web.HTTPException as error:
        return _refusal(error.status, error.reason, f"POST to {SYNC_PATH}")
    except Exception:
        logger.exception("a sync request failed: %s", request.path)
        return _refusal(500, "the coordinator failed; its log says why", "ask again")


def _refusal(status: int, error: str, fix: str) -> web.Response:
    return web.json_response(SyncError(error=error, fix=fix).to_wire(), status=status)
