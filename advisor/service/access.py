"""Who sent a request, and whether their role allows it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from fastapi import BackgroundTasks, Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.orm import Session

from advisor.cache.reader import Reader
from advisor.errors import StoreError
from advisor.service import attempts, tokens
from advisor.service.database import Database
from advisor.service.limits import Guesses
from advisor.service.lookups import Lookups
from advisor.service.loop import Loop
from advisor.service.machines import Machine
from advisor.service.metrics import Metrics
from advisor.service.roles import Role
from advisor.service.schema import Attempt
from advisor.service.tokens import Caller

COOKIE = "advisor_session"
MOST_LARGE = 4
"""Large bodies in memory at once."""
_log = logging.getLogger("advisor")
_BEARER = HTTPBearer(auto_error=False, description="A token that `advisor token` made.")
Found = TypeVar("Found")


@dataclass(slots=True)
class Service:
    """What all requests share.

    Attributes:
        reader: decides which records are valid, and whose signatures are required.
        behind_proxy: only a proxy connects, and names the client.
        large: held by a request with a large body; others wait.
        stopping: set when the server stops; requests that have come are answered.
        lookups: counts that are not in the database yet.
        loops: the server's threads.
        machines: what jobs can be started on, by the executor's name.
    """

    database: Database
    reader: Reader
    behind_proxy: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    guesses: Guesses = field(default_factory=Guesses)
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_LARGE))
    stopping: threading.Event = field(default_factory=threading.Event)
    lookups: Lookups = field(default_factory=Lookups)
    loops: list[Loop] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def troubles(self) -> list[str]:
        """What is wrong with the server's threads, for a banner on its pages."""
        return [loop.trouble for loop in self.loops if loop.trouble]

    def address(self, request: Request) -> str:
        """The client's address. The last one in a proxy's list is the proxy's own word."""
        forwarded = request.headers.get("x-forwarded-for", "") if self.behind_proxy else ""
        last = forwarded.rpartition(",")[2].strip()
        return (last or (request.client.host if request.client else ""))[:64]

    def encrypted(self, request: Request) -> bool:
        """Whether the client speaks TLS, to the proxy."""
        return self.behind_proxy and request.headers.get("x-forwarded-proto", "") == "https"

    def admit(self, request: Request, token: str) -> Caller:
        """The caller of a token; raises HTTPException as `owner` does."""
        address = self.address(request)
        return self.owner(request, token, lambda session: tokens.find(session, token, address))

    def owner(self, request: Request, token: str, find: Callable[[Session], Found | None]) -> Found:
        """What `find` finds for a token.

        Raises:
            HTTPException: it is invalid, or there were too many invalid ones.
        """
        if not token:
            raise unknown("a token is asked for, as Authorization: Bearer TOKEN")
        address = self.address(request)
        self.guesses.check(token, address)
        with self.database.reading() as session:
            found = find(session)
        self.guesses.note(token, address, valid=found is not None)
        if found is None:
            raise unknown("this token is unknown, expired or revoked")
        return found

    def check_sender(self, request: Request) -> None:
        """Raise HTTPException if a request has no valid token."""
        token = request.headers.get("authorization", "").partition(" ")[2].strip()
        try:
            self.admit(request, token)
        except StoreError as exc:
            raise away() from exc

    def note_use(self, caller: Caller) -> None:
        """Note the time of a token's last use. No answer waits for it, and it may fail."""
        try:
            with self.database.writing() as session:
                tokens.note_use(session, caller)
        except StoreError as exc:
            _log.warning("the use of a token could not be noted: %s", exc)


def unknown(why: str) -> HTTPException:
    return HTTPException(401, why, {"WWW-Authenticate": "Bearer"})


def away() -> HTTPException:
    """For StoreError, whose text is for the one who runs the server."""
    return HTTPException(503, "the server's database does not answer", {"Retry-After": "1"})


# These two are async because any other dependency takes a thread.
async def _here(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _token(sent: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> str:
    return sent.credentials if sent else ""


Here = Annotated[Service, Depends(_here)]
Sent = Annotated[str, Depends(_token)]


def needs(role: Role) -> Callable[..., Caller]:
    """A dependency: the caller, whose token has this role or a higher one."""

    def caller(request: Request, here: Here, token: Sent, after: BackgroundTasks) -> Caller:
        found = here.admit(request, token)
        found.check(role)
        if found.unseen:
            after.add_task(here.note_use, found)
        return found

    return caller


Reads = Annotated[Caller, Depends(needs("read"))]
Works = Annotated[Caller, Depends(needs("worker"))]
Administers = Annotated[Caller, Depends(needs("admin"))]


def submits(here: Here, caller: Annotated[Caller, Depends(needs("submit"))]) -> Caller:
    """A dependency: who may submit jobs. An attempt may not, even if its code reads the token."""
    with here.database.reading() as session:
        if attempts.of_token(session, caller.token) is not None:
            raise PermissionError("this token is an attempt's; it asks for no jobs")
    return caller


def own(here: Here, caller: Works) -> Attempt:
    """A dependency: the attempt that this token was made for."""
    with here.database.reading() as session:
        attempt = attempts.of_token(session, caller.token)
    if attempt is None:
        raise PermissionError("this token is of no attempt; an attempt's own worker asks this")
    return attempt


def starts(request: Request, here: Here, token: Sent) -> Attempt:
    """A dependency: the attempt whose start token this is. No other token is accepted."""
    return here.owner(request, token, lambda session: attempts.of_start(session, token))


Submits = Annotated[Caller, Depends(submits)]
Own = Annotated[Attempt, Depends(own)]
Starts = Annotated[Attempt, Depends(starts)]
