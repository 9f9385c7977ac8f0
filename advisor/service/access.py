"""Who sent a request, and whether their role allows it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import BackgroundTasks, Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from advisor.cache.codec import MAX_BYTES
from advisor.cache.reader import Reader
from advisor.cache.settings import MAX_ARTIFACTS
from advisor.errors import StoreError
from advisor.jobs.bounds import MAX_STUDY
from advisor.jobs.parcel import MAX_PACKED
from advisor.service import attempts, tokens
from advisor.service.database import Database
from advisor.service.limits import Guesses, Rate, Rates, bearer
from advisor.service.lookups import Lookups
from advisor.service.loop import Loop
from advisor.service.machines import Machine
from advisor.service.metrics import Metrics
from advisor.service.schema import Attempt
from advisor.service.tokens import Caller

READS = Rate(a_second=500, at_once=2000)
WRITES = Rate(a_second=100, at_once=1000)
"""Of one token."""
GUESSES = Rate(a_second=1, at_once=30)
"""Invalid tokens from one address."""
COOKIE = "advisor_session"
_GUESSED = "too many invalid tokens from this address"
_log = logging.getLogger("advisor")
_BEARER = HTTPBearer(auto_error=False, description="A token that `advisor token` made.")
_Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


@dataclass(slots=True)
class Service:
    """What all requests share.

    Attributes:
        reader: decides which records are valid, and whose signatures are required.
        behind_proxy: only a proxy connects, and names the client.
        stopping: set when the server stops; requests that have come are answered.
        lookups: counts that are not in the database yet.
        loops: the server's threads.
        machines: what jobs can be started on, by the executor's name.
    """

    database: Database
    reader: Reader
    behind_proxy: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    reads: Rates = field(default_factory=lambda: Rates(READS))
    writes: Rates = field(default_factory=lambda: Rates(WRITES))
    guesses: Guesses = field(default_factory=lambda: Guesses(GUESSES))
    stopping: threading.Event = field(default_factory=threading.Event)
    lookups: Lookups = field(default_factory=Lookups)
    loops: list[Loop] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def troubles(self) -> list[str]:
        """What is wrong with the server's threads, for people, as a banner on its pages."""
        return [loop.trouble for loop in self.loops if loop.trouble]

    def address(self, request: Request) -> str:
        """The client's address. Of a proxy's list only the last one is its own word."""
        forwarded = request.headers.get("x-forwarded-for", "") if self.behind_proxy else ""
        told = forwarded.rpartition(",")[2].strip()
        return (told or (request.client.host if request.client else ""))[:64]

    def encrypted(self, request: Request) -> bool:
        """Whether the client speaks TLS, to the proxy."""
        return self.behind_proxy and request.headers.get("x-forwarded-proto", "") == "https"

    def admit(self, token: str, address: str) -> Caller:
        """The caller that a token belongs to.

        Raises:
            HTTPException: it is invalid, or there were too many invalid ones.
        """
        self.hear(token, address)
        with self.database.reading() as session:
            caller = tokens.find(session, token, address)
        if caller is None:
            raise self.refused(token, address)
        self.guesses.good(token)
        return caller

    def hear(self, token: str, address: str) -> None:
        """Raise HTTPException if this address has sent too many invalid tokens."""
        if not self.guesses.heard(token, address):
            raise _busy(_GUESSED)

    def refused(self, token: str, address: str) -> HTTPException:
        """The answer to an invalid token; after too many of them, to wait."""
        return unknown() if self.guesses.wrong(token, address) else _busy(_GUESSED)

    def most(self, request: Request) -> int:
        """Bytes that a request may send in its body.

        Raises:
            HTTPException: it has no valid token. StoreError: the database does not answer.
        """
        if not (token := bearer(request)):
            raise unknown("a token is asked for, as Authorization: Bearer TOKEN")
        caller = self.admit(token, self.address(request))
        large = {
            "/api/archives/": ("submit", MAX_PACKED),
            "/api/artifacts/": ("worker", MAX_ARTIFACTS),
            "/api/attempt/studies/": ("worker", MAX_STUDY),
        }
        for start, (role, most) in large.items():
            if request.url.path.startswith(start) and caller.may(role):
                return most
        return MAX_BYTES

    def note(self, caller: Caller) -> None:
        """Note the time of a token's last use. No answer waits for it, and it may fail."""
        try:
            with self.database.writing() as session:
                tokens.note_use(session, caller)
        except StoreError as exc:
            _log.warning("the use of a token could not be noted: %s", exc)

    def limit(self, token: int, writes: bool) -> None:
        """Raise HTTPException if a token is used too often."""
        if not (self.writes if writes else self.reads).take(token):
            raise _busy("this token is used too often")


def service_of(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _here(request: Request) -> Service:
    """A dependency. It is async because any other takes a thread."""
    return service_of(request)


Here = Annotated[Service, Depends(_here)]


def needs(role: str) -> Callable[..., Caller]:
    """A dependency: the caller, whose token has this role or a higher one."""

    def caller(request: Request, here: Here, bearer: _Bearer, after: BackgroundTasks) -> Caller:
        if bearer is None:
            raise unknown("a token is asked for, as Authorization: Bearer TOKEN")
        found = here.admit(bearer.credentials, here.address(request))
        if not found.may(role):
            raise HTTPException(403, f"this token may {found.role}; this needs {role}")
        here.limit(found.token, writes=role != "read")
        if found.unseen:
            after.add_task(here.note, found)
        return found

    caller.role = role  # type: ignore[attr-defined] # for who walks over the routes
    return caller


Reads = Annotated[Caller, Depends(needs("read"))]
Works = Annotated[Caller, Depends(needs("worker"))]
Administers = Annotated[Caller, Depends(needs("admin"))]


@dataclass(frozen=True, slots=True)
class Attempting:
    """A worker, and the attempt whose token it has."""

    caller: Caller
    attempt: Attempt


def own(here: Here, caller: Works) -> Attempting:
    """A dependency: the attempt that this token was made for."""
    with here.database.reading() as session:
        attempt = attempts.of_token(session, caller.token)
    if attempt is None:
        raise HTTPException(403, "this token is of no attempt; an attempt's own worker asks this")
    return Attempting(caller, attempt)


@dataclass(frozen=True, slots=True)
class Starting:
    """Who sent an attempt's start token: its worker, or somebody who has read the token."""

    attempt: Attempt
    address: str


def starts(request: Request, here: Here, bearer: _Bearer) -> Starting:
    """A dependency: the attempt whose start token this is. No other token is accepted."""
    if bearer is None:
        raise unknown("a start token is asked for, as Authorization: Bearer TOKEN")
    address = here.address(request)
    here.hear(bearer.credentials, address)
    with here.database.reading() as session:
        attempt = attempts.of_start(session, bearer.credentials)
    if attempt is None:
        raise here.refused(bearer.credentials, address)
    here.limit(attempt.token, writes=True)
    return Starting(attempt, address)


def submits(here: Here, caller: Annotated[Caller, Depends(needs("submit"))]) -> Caller:
    """A dependency: who may submit jobs. An attempt may not, even if its code reads the token."""
    with here.database.reading() as session:
        if attempts.of_token(session, caller.token) is not None:
            raise HTTPException(403, "this token is an attempt's; it asks for no jobs")
    return caller


submits.role = "submit"  # type: ignore[attr-defined]
Submits = Annotated[Caller, Depends(submits)]
own.role = "worker"  # type: ignore[attr-defined] # for who walks over the routes
Own = Annotated[Attempting, Depends(own)]
starts.role = "start"  # type: ignore[attr-defined]
Starts = Annotated[Starting, Depends(starts)]


@contextlib.contextmanager
def forbidding() -> Iterator[None]:
    """Answer a PermissionError of this block with 403."""
    try:
        yield
    except PermissionError as exc:
        raise HTTPException(403, str(exc)) from exc


def unknown(why: str = "this token is unknown, expired or revoked") -> HTTPException:
    return HTTPException(401, why, {"WWW-Authenticate": "Bearer"})


def _busy(why: str) -> HTTPException:
    return HTTPException(429, f"{why}; wait a second", {"Retry-After": "1"})
