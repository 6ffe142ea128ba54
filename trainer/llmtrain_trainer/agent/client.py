"""The long-poll to the coordinator: observed state up, the newest order down, for as long as the agent lives."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from pydantic import ValidationError

from llmtrain_api.sync import HOLD_SECONDS, MAX_BODY_BYTES, SYNC_PATH, Order, SyncError, SyncRequest, SyncResponse
from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.settings import Settings

CONNECT_SECONDS = 2.0
ANSWER_MARGIN_SECONDS = 5.0
"""Beyond the time the coordinator said it may hold a request."""
UNHELD_PAUSE_SECONDS = 0.5
"""Before asking again a coordinator that answered at once although there was nothing new."""


@dataclass(frozen=True)
class Pace:
    """Pauses between tries, in seconds: doubled from first to longest."""

    first: float
    longest: float

    def pause(self, failures: int) -> float:
        """Return the pause after this many failures in a row, spread so that a thousand agents do not come at once."""
        longest: float = min(self.longest, self.first * 2.0 ** min(failures - 1, 16))
        return random.uniform(0.5, 1.0) * longest


AWAY = Pace(0.1, 2.0)
"""The coordinator cannot be reached or is not ready: recovery waits for us, so be quick."""
REFUSED = Pace(0.5, 5.0)
"""It says no: that changes when a person or a restarting operator changes something."""


class _Failure(Exception):
    """One try did not bring an order."""

    def __init__(self, event: str, message: str, pace: Pace = AWAY) -> None:
        super().__init__(message)
        self.event = event
        self.pace = pace


class Superseded(Exception):
    """The coordinator (409) serves another agent under our name."""


@dataclass(frozen=True)
class Ends:
    """What the client gets its request from and gives the answer to."""

    report: Callable[[int, str], SyncRequest]
    """Makes the newest report with this sequence number and version."""
    obey: Callable[[Order], bool]
    """Returns whether the order is in force now. May raise ValueError."""


@dataclass(frozen=True)
class _Answer:
    response: SyncResponse
    asked_at: float
    """Loop time."""


class SyncClient:
    """Nothing that the coordinator does or fails to do ends `run`, except that it names us superseded."""

    def __init__(self, settings: Settings, ends: Ends, log: EventLog) -> None:
        self._token_file = settings.token_file
        path = SYNC_PATH.format(namespace=settings.job_namespace, name=settings.job_name, pod=settings.pod_name)
        self._url = settings.coordinator_url + path
        self._ends = ends
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._sequence = 0
        self._version = ""
        self._hold_seconds = HOLD_SECONDS
        self._last_failure = ""
        self._failures = 0
        self._connector = aiohttp.TCPConnector(ttl_dns_cache=60, socket_factory=_socket)
        self._session = aiohttp.ClientSession(connector=self._connector)
        self.last_answer = self._loop.time()
        """Loop time of the last order."""
        self.last_heard = self._loop.time()
        """Loop time of the last answer of any kind: who refuses us can be reached."""

    @property
    def silence_seconds(self) -> float:
        """How long nobody has answered; a request that is being held, as agreed, is no silence."""
        silent = self._loop.time() - self.last_heard
        return silent if silent > 2 * self._hold_seconds else 0.0

    def news(self) -> None:
        """Have a fresh report sent now, even if a request is held."""
        self._news.set()

    async def run(self) -> None:
        """Sync for ever.

        Raises:
            Superseded: another agent has our place.
        """
        while True:
            self._news.clear()
            exchange = asyncio.create_task(self._exchange())
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait({exchange, news}, return_when=asyncio.FIRST_COMPLETED)
                if exchange.done():
                    await self._after(exchange)
            finally:
                news.cancel()
                exchange.cancel()
                await asyncio.gather(exchange, news, return_exceptions=True)

    async def last_report(self, seconds: float) -> None:
        """Send one more report, whatever comes of it."""
        with contextlib.suppress(TimeoutError, _Failure, Superseded):
            async with asyncio.timeout(seconds):
                await self._exchange(leaving=True)

    async def close(self) -> None:
        await self._session.close()

    async def _after(self, exchange: asyncio.Task[_Answer]) -> None:
        """Obey the answer, or wait before the next try."""
        try:
            busy = self._obey(exchange.result())
        except _Failure as failure:
            await self._wait_after(failure)
        else:
            if busy:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), UNHELD_PAUSE_SECONDS)

    async def _wait_after(self, failure: _Failure) -> None:
        self._failures += 1
        self._connector.clear_dns_cache()  # the coordinator may have moved
        described = f"{failure.event}: {failure}"
        if described != self._last_failure:  # the same may be tried hundreds of times
            self._log.warning(failure.event, error=str(failure), url=self._url)
            self._last_failure = described
        await asyncio.sleep(failure.pace.pause(self._failures))

    def _obey(self, answer: _Answer) -> bool:
        """Return True where asking again at once would make a busy loop: nothing changed, yet it was not held."""
        order, version = answer.response.order, answer.response.version
        changed = version != self._version
        try:
            accepted = self._ends.obey(order) if changed else True
        except ValueError as error:
            raise _Failure("answer_malformed", str(error)) from error
        if self._failures:
            self._log.info("coordinator_back", failures=self._failures)
        self._failures, self._last_failure = 0, ""
        self.last_answer = self._loop.time()
        self._hold_seconds = min(max(answer.response.hold_seconds, 0.0), 600.0)
        if not accepted:
            self._log.warning("order_stale", kind=order.kind, of_attempt=order.attempt, version=version)
        elif changed:
            self._version = version
            self._log.info("order", kind=order.kind, of_attempt=order.attempt, version=version)
        return not accepted or (not changed and self._loop.time() - answer.asked_at < UNHELD_PAUSE_SECONDS)

    async def _exchange(self, leaving: bool = False) -> _Answer:
        """Send one report and wait for its answer.

        Raises:
            _Failure: there is no order in what came back, if anything came.
            Superseded: another agent has our place.
        """
        self._sequence += 1
        asked_at = self._loop.time()
        report = self._ends.report(self._sequence, self._version).model_copy(update={"leaving": leaving})
        timeout = aiohttp.ClientTimeout(
            total=None, connect=CONNECT_SECONDS, sock_read=self._hold_seconds + ANSWER_MARGIN_SECONDS
        )
        try:
            async with self._session.post(
                self._url,
                data=report.model_dump_json(by_alias=True, exclude_none=True),
                headers={"Authorization": f"Bearer {self._token()}", "Content-Type": "application/json"},
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                self.last_heard = self._loop.time()
                return _Answer(_parse(answer.status, await _body(answer)), asked_at)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _Failure("coordinator_away", f"{type(error).__name__}: {error}") from error

    def _token(self) -> str:
        try:
            token = self._token_file.read_text().strip()
        except (OSError, ValueError) as error:
            raise _Failure("token_unreadable", str(error), REFUSED) from error
        if not token or not token.isascii() or not token.isprintable():
            raise _Failure("token_unreadable", f"{self._token_file} holds no token", REFUSED)
        return token


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _Failure("answer_malformed", f"more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _parse(status: int, body: bytes) -> SyncResponse:
    if status == HTTPStatus.OK:
        try:
            return SyncResponse.model_validate_json(body)
        except ValidationError as error:
            raise _Failure("answer_malformed", str(error)) from error
    said = _refusal(body)
    if status == HTTPStatus.CONFLICT:
        raise Superseded(said)
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise _Failure("coordinator_away", f"HTTP {status}: {said}")
    raise _Failure("coordinator_refused", f"HTTP {status}: {said}", REFUSED)


def _refusal(body: bytes) -> str:
    try:
        refusal = SyncError.model_validate_json(body)
    except ValidationError:
        return body[:200].decode(errors="replace")
    return f"{refusal.error} {refusal.fix}".strip()


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that finds out within seconds that the coordinator's node is gone, although nothing is sent."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
    return made
