"""Limits of every request (size of the body, rate), and the headers of every answer. Slow clients
are the proxy's."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.cache.codec import MAX_BYTES
from advisor.errors import StoreError
from advisor.jobs.token import digest

MAX_UNTRUSTED = 2**14
"""Bytes of a body that is read without a valid token, as of a login."""
MOST_LARGE = 4
"""Bodies of more than MAX_BYTES at once, each in memory."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_MOST_KNOWN = 10_000


class Bodies:
    """Refuses a body before it is read: of a request without a valid token, or one that is larger
    than its token may send. uvicorn discards what comes of it."""

    def __init__(self, app: ASGIApp, most: Callable[[Request], int]) -> None:
        """`most`: bytes that a request's token may send; raises HTTPException for no valid one."""
        self._app, self._most = app, most
        self._large = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = _declared(scope) if scope["type"] == "http" else 0
        if size is not None and size <= MAX_UNTRUSTED:
            await self._app(scope, receive, send)
            return
        try:
            most = await run_in_threadpool(self._most, Request(scope))
            if size is not None and size > most:
                raise _too_large(most)
            large = most > MAX_BYTES and (size is None or size > MAX_BYTES)
            if large and self._large >= MOST_LARGE:
                raise HTTPException(503, "too many large bodies at once", {"Retry-After": "1"})
        except (HTTPException, StoreError) as exc:
            await _refusal(exc)(scope, receive, send)
            return
        self._large += large
        try:
            await self._app(scope, _bounded(receive, most), send)
        finally:
            self._large -= large


def _declared(scope: Scope) -> int | None:
    """The bytes of a request's body; None where it comes in chunks, of which none says how many."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    return int(headers.get(b"content-length", b"0"))


def _bounded(receive: Receive, most: int) -> Receive:
    size = 0

    async def read() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise _too_large(most)
        return message

    return read


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most} bytes")


def _refusal(exc: HTTPException | StoreError) -> JSONResponse:
    if isinstance(exc, StoreError):
        exc = HTTPException(503, "the server's database does not answer", {"Retry-After": "1"})
    return JSONResponse({"detail": exc.detail}, exc.status_code, exc.headers)


def bearer(request: Request) -> str:
    """The token that a request has, whosever it is; '' for none."""
    return request.headers.get("authorization", "").partition(" ")[2].strip()


class Headers:
    """Adds HEADERS to every answer, and that nothing is cached unless the answer says otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, add)


@dataclass(frozen=True, slots=True)
class Rate:
    """How many a second in the long run, and how many at once."""

    a_second: float
    at_once: float


class Rates:
    """Rate limits as token buckets. Each server has its own."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, who: Hashable) -> bool:
        """Take one from a bucket; whether there was one."""
        with self._lock:
            left = self._now(who)
            may = left >= 1
            self._left[who] = left - may, time.monotonic()
            _note(self._left, who)
            return may

    def spent(self, who: Hashable) -> bool:
        """Whether a bucket is empty."""
        with self._lock:
            return self._now(who) < 1

    def _now(self, who: Hashable) -> float:
        now = time.monotonic()
        left, at = self._left.get(who, (self._rate.at_once, now))
        return min(self._rate.at_once, left + (now - at) * self._rate.a_second)


class Guesses:
    """Invalid tokens by the addresses that sent them. After too many, only tokens that were valid
    before are looked up: a flood costs the database nothing, nor others at the same address."""

    def __init__(self, rate: Rate) -> None:
        self._wrong = Rates(rate)
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def heard(self, token: str, address: str) -> bool:
        """Whether a token is to be looked up."""
        with self._lock:
            good = digest(token) in self._good
        return good or not self._wrong.spent(address)

    def good(self, token: str) -> None:
        with self._lock:
            self._good[digest(token)] = None
            _note(self._good, digest(token))

    def wrong(self, token: str, address: str) -> bool:
        """Note an invalid token; False if there were too many."""
        with self._lock:
            self._good.pop(digest(token), None)
        return self._wrong.take(address)


def _note(known: OrderedDict[Any, Any], last: Hashable) -> None:
    """Move a key to the end, and drop the oldest of too many."""
    known.move_to_end(last)
    if len(known) > _MOST_KNOWN:
        known.popitem(last=False)
