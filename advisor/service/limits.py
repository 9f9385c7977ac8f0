"""What holds for every request, whoever sends it: size, time, how often; and what every answer
says to a browser."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.cache.codec import MAX_BYTES
from advisor.jobs.token import digest

BODY_S, LARGE_S = 10.0, 60.0
"""For a whole body to come; for one of LARGE."""
LARGE = ("/api/archives/", "/api/artifacts/", "/api/attempt/studies/")
"""Where a body may be larger than others, from whoever has a token that may send it."""
MOST_LARGE, MOST_OF_ONE = 4, 2
"""Such bodies at once, each in memory: of all, and of one token, which leaves room for others."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_LASTING = "max-age=31536000"
_MOST_KNOWN = 10_000


class Bodies:
    """Reads a body whole before anything is done for it, and refuses one that is too large or slow:
    a thread and a connection to the database wait for no client."""

    def __init__(self, app: ASGIApp, most: Callable[[Request], int]) -> None:
        """`most`: bytes that the body of a request may have, which goes to one of LARGE."""
        self._app, self._most = app, most
        self._large: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not scope["path"].startswith(LARGE) or scope["method"] != "PUT":
            await self._bounded(scope, receive, send, MAX_BYTES, BODY_S)
            return
        request = Request(scope)
        most = await run_in_threadpool(self._most, request)
        if most <= MAX_BYTES:
            await self._bounded(scope, receive, send, MAX_BYTES, BODY_S)
            return
        token = bearer(request)
        if self._large.total() >= MOST_LARGE or self._large[token] >= MOST_OF_ONE:
            refusal = _refuse(503, "too many large bodies at once", {"Retry-After": "1"})
            await refusal(scope, receive, send)
            return
        self._large[token] += 1
        try:
            await self._bounded(scope, receive, send, most, LARGE_S)
        finally:
            self._large -= Counter((token,))  # without those that have none

    async def _bounded(
        self, scope: Scope, receive: Receive, send: Send, most: int, within_s: float
    ) -> None:
        try:
            body = await asyncio.wait_for(_whole(receive, most), within_s)
        except TimeoutError:
            refusal = _refuse(408, f"the body took longer than {within_s:.0f} s")
            await refusal(scope, receive, send)
            return
        except ValueError:
            await _refuse(413, f"the body is larger than {most} bytes")(scope, receive, send)
            return
        if body is None:  # hung up
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, read, send)


def bearer(request: Request) -> str:
    """The token that a request has, whosever it is; '' for none."""
    return request.headers.get("authorization", "").partition(" ")[2].strip()


async def _whole(receive: Receive, most: int) -> bytes | None:
    """A body; None where the client hangs up. Raises ValueError where it is too large."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise ValueError
        if not message.get("more_body", False):
            return b"".join(parts)


def _refuse(status: int, why: str, more: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": why}, status, headers={"Connection": "close", **(more or {})})


class Headers:
    """Adds what every answer says to a browser; nothing is kept there but what says otherwise."""

    def __init__(self, app: ASGIApp, lasting: bool) -> None:
        self._app = app
        self._all: Mapping[str, str] = HEADERS
        if lasting:
            self._all = {**HEADERS, "Strict-Transport-Security": _LASTING}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._all.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, say)


@dataclass(frozen=True, slots=True)
class Rate:
    """So many a second on the long run, and so many at once."""

    a_second: float
    at_once: float


class Rates:
    """How often somebody may do something, as buckets that fill again. Each server has its own."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, who: Hashable) -> bool:
        """Whether they may once more, now."""
        with self._lock:
            left = self._now(who)
            may = left >= 1
            self._left[who] = left - may, time.monotonic()
            _note(self._left, who)
            return may

    def spent(self, who: Hashable) -> bool:
        """Whether they may not, now."""
        with self._lock:
            return self._now(who) < 1

    def _now(self, who: Hashable) -> float:
        now = time.monotonic()
        left, at = self._left.get(who, (self._rate.at_once, now))
        return min(self._rate.at_once, left + (now - at) * self._rate.a_second)


class Guesses:
    """Tokens that are none, by the addresses that they come from. Where there were too many, none
    is looked up any more but those that were good before: a flood costs the database nothing, and
    who works at the same address nothing either."""

    def __init__(self, rate: Rate) -> None:
        self._wrong = Rates(rate)
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def heard(self, token: str, address: str) -> bool:
        """Whether this token may be looked up."""
        with self._lock:
            good = digest(token) in self._good
        return good or not self._wrong.spent(address)

    def good(self, token: str) -> None:
        with self._lock:
            self._good[digest(token)] = None
            _note(self._good, digest(token))

    def wrong(self, token: str, address: str) -> bool:
        """Whether that may be said, as there were not too many."""
        with self._lock:
            self._good.pop(digest(token), None)
        return self._wrong.take(address)


def _note(known: OrderedDict[Any, Any], last: Hashable) -> None:
    """Forget the one that was not met for longest, where there are too many."""
    known.move_to_end(last)
    if len(known) > _MOST_KNOWN:
        known.popitem(last=False)
