"""Who sent a request, and whether their role allows it. Without a valid token, no large body is
read, and tokens cannot be guessed. A proxy handles slow clients and request rates."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from advisor.cache.records import Records
from advisor.errors import StoreError
from advisor.jobs.token import Role, digest
from advisor.service import tokens
from advisor.service.database import Database
from advisor.service.executors import Machine
from advisor.service.lookups import LookupCounter
from advisor.service.loop import Loop
from advisor.service.metrics import Metrics
from advisor.service.schema import Attempt
from advisor.service.tokens import Caller

COOKIE = "advisor_session"
_BEARER = HTTPBearer(auto_error=False, description="A token that `advisor token` made.")
Owner = TypeVar("Owner")
MAX_UNTRUSTED = 2**14  # largest body in bytes that is read without a valid token, such as a login's
_MAX_KNOWN = 10_000


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


@dataclass(slots=True)
class Service:
    """The objects that all requests share.

    Attributes:
        reader: decides which records are valid, and whose signatures are required.
        behind_proxy: only a proxy connects, and names the client.
        lookups, used: counts of lookups, and when each token was last used. Only `flush` writes
            them to the database, so that no request waits for a write.
        loops: the server's threads.
        machines: the executors' last answers, by the executor's name.
    """

    database: Database
    reader: Records
    behind_proxy: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    guesses: Guesses = field(default_factory=Guesses)
    lookups: LookupCounter = field(default_factory=LookupCounter)
    used: dict[int, float] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def troubles(self) -> list[str]:
        """What is wrong with the server's threads, for a banner on its pages."""
        return [loop.trouble for loop in self.loops if loop.trouble]

    def address(self, request: Request) -> str:
        """The client's address. Of a proxy's list, the proxy itself wrote only the last address."""
        forwarded = request.headers.get("x-forwarded-for", "") if self.behind_proxy else ""
        last = forwarded.rpartition(",")[2].strip()
        return (last or (request.client.host if request.client else ""))[:64]

    def url(self, request: Request) -> str:
        """This server's address, as the client has it: https if the client encrypts for a proxy."""
        proto = request.headers.get("x-forwarded-proto", "") if self.behind_proxy else ""
        host = request.headers.get("host", "")
        return f"https://{host}" if proto == "https" else f"http://{host}"

    def admit(self, request: Request, token: str) -> Caller:
        """The caller with this token; raises HTTPException as `owner` does."""
        address = self.address(request)
        found = self.owner(request, token, lambda session: tokens.find(session, token, address))
        if found.attempt is None:
            self.used[found.token] = time.time()
        return found

    def owner(self, request: Request, token: str, find: Callable[[Session], Owner | None]) -> Owner:
        """Return the result of `find`, which looks the token up. Raises HTTPException if the token
        is invalid, or its address sent too many invalid tokens."""
        if not token:
            raise unauthorized("the request has no token (Authorization: Bearer TOKEN)")
        address = self.address(request)
        self.guesses.check(token, address)
        found = self.database.read(find)
        self.guesses.note(token, address, valid=found is not None)
        if found is None:
            raise unauthorized("this token is unknown, expired or revoked")
        return found

    def check_sender(self, request: Request) -> None:
        """Raise HTTPException if a request has no valid token."""
        token = request.headers.get("authorization", "").partition(" ")[2].strip()
        try:
            self.admit(request, token)
        except StoreError as exc:
            raise unavailable() from exc

    def flush(self) -> None:
        self.lookups.flush(self.database)
        used, self.used = self.used, {}
        self.database.write(tokens.note_uses, used)


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


def unauthorized(why: str) -> HTTPException:
    return HTTPException(401, why, {"WWW-Authenticate": "Bearer"})


def unavailable() -> HTTPException:
    """The answer to a StoreError. The error's own text goes only to the server's log."""
    return HTTPException(503, "the server's database does not answer", {"Retry-After": "1"})


# Dependencies that do not wait are async, because FastAPI runs any other one in a thread.
async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _token(sent: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> str:
    return sent.credentials if sent else ""


ServiceDep = Annotated[Service, Depends(_service)]
BearerToken = Annotated[str, Depends(_token)]


def _caller(request: Request, service: ServiceDep, token: BearerToken) -> Caller:
    return service.admit(request, token)


def needs(role: Role) -> Any:
    """A FastAPI dependency: the caller, whose token has this role or a higher one."""

    async def checked(caller: Annotated[Caller, Depends(_caller)]) -> Caller:
        caller.check(role)
        return caller

    return Depends(checked)


ReadCaller = Annotated[Caller, needs("read")]
WorkCaller = Annotated[Caller, needs("worker")]
AdminCaller = Annotated[Caller, needs("admin")]


async def _submitter(caller: Annotated[Caller, needs("submit")]) -> Caller:
    """A caller who may submit jobs. An attempt may not, even if its code reads the token."""
    if caller.attempt is not None:
        raise PermissionError("the token of an attempt cannot submit jobs")
    return caller


async def _own_attempt(caller: WorkCaller) -> Attempt:
    """The attempt that this token was made for."""
    if caller.attempt is None:
        raise PermissionError("only the token of an attempt may do this")
    return caller.attempt


def _starting_attempt(request: Request, service: ServiceDep, token: BearerToken) -> Attempt:
    """The attempt whose start token this is. No other token is accepted."""
    made = select(Attempt).where(Attempt.start == digest(token))
    return service.owner(request, token, lambda session: session.scalar(made))


SubmitCaller = Annotated[Caller, Depends(_submitter)]
OwnAttempt = Annotated[Attempt, Depends(_own_attempt)]
StartingAttempt = Annotated[Attempt, Depends(_starting_attempt)]
