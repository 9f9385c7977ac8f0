"""Limits for requests without a valid token: no large bodies, and no guessing of tokens. A proxy
handles slow clients and request rates."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from fastapi import HTTPException, Request
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.jobs.token import digest

MAX_UNTRUSTED = 2**14
"""Largest body in bytes that is read without a valid token, such as a login's."""
_MAX_KNOWN = 10_000


class BodyMiddleware:
    """Checks a request's token before reading its body, unless the body is small."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], object]) -> None:
        """`check`: raises HTTPException if a request has no valid token."""
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        size = int(headers.get(b"content-length", 0))
        checked = size <= MAX_UNTRUSTED and b"transfer-encoding" not in headers

        async def read() -> Message:
            nonlocal checked
            if not checked:
                await run_in_threadpool(self._check, Request(scope))
                checked = True
            return await receive()

        await self._app(scope, read, send)


class Guesses:
    """Counts invalid tokens by address, from 0 again every `period_s`. After `most`, only tokens
    that were valid before are looked up: a flood does not reach the database, and others at the
    same address can go on working."""

    def __init__(self, most: int = 30, period_s: float = 30.0) -> None:
        self._most, self._period_s = most, period_s
        self._began = time.monotonic()
        self._wrong: Counter[str] = Counter()
        self._valid: set[bytes] = set()
        self._lock = threading.Lock()

    def check(self, token: str, address: str) -> None:
        """Raise HTTPException if `address` sent too many invalid tokens, and `token` is unknown."""
        with self._lock:
            if time.monotonic() - self._began > self._period_s or len(self._wrong) > _MAX_KNOWN:
                self._began = time.monotonic()
                self._wrong.clear()
            if self._wrong[address] >= self._most and digest(token) not in self._valid:
                why = "too many invalid tokens from this address; wait a minute"
                raise HTTPException(429, why, {"Retry-After": f"{self._period_s:.0f}"})

    def note(self, token: str, address: str, *, valid: bool) -> None:
        """Count an invalid token, or remember a valid one."""
        with self._lock:
            if valid:
                self._valid = self._valid if len(self._valid) < _MAX_KNOWN else set()
                self._valid.add(digest(token))
            else:
                self._valid.discard(digest(token))
                self._wrong[address] += 1
