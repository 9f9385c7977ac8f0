"""A server from start to stop: the socket, the threads, signals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvicorn
from sqlalchemy.orm import Session

from advisor.cache.reader import Reader
from advisor.cache.signing import KeyRing
from advisor.errors import UsageError
from advisor.open_store import refusal
from advisor.service import reconcile, tokens, upkeep
from advisor.service.access import Service
from advisor.service.app import application
from advisor.service.database import DAY_S, Database
from advisor.service.executors.schemes import LOCAL, NONE, open_executors
from advisor.service.loop import Loop
from advisor.service.reconcile import Reconciler
from advisor.tuners.host import keep_private

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CONNECTIONS = 2000
_FILES = 500
"""Open files beside connections, at most."""
_IDLE_S = 75
_COUNTS_S = 30.0
"""Between two writes of the counts of lookups."""
_STOPS_S = 10
"""For requests that are being answered when the server is told to stop."""


class Server(uvicorn.Server):
    """Sets an event and calls a function before it stops to answer."""

    def __init__(
        self,
        config: uvicorn.Config,
        stopping: threading.Event,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._stopping, self._last = stopping, last

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._last)
        await super().shutdown(sockets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a server listens.

    Attributes:
        port: 0 for any that is free.
        behind_proxy: nobody but a proxy connects, which encrypts and says who the client is.
        url: where workers find it; '' for where it listens.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    behind_proxy: bool = False
    url: str = ""

    def __post_init__(self) -> None:
        if self.url and not _is_url(self.url):
            raise UsageError(f"--url {self.url[:80]!r}: expected http[s]://HOST[:PORT][/PATH]")
        if self.host not in LOOPBACK and not self.behind_proxy:
            raise UsageError(
                f"--host {self.host}: tokens would travel in the clear; put a proxy that encrypts "
                "before it, and give --behind-proxy"
            )

    @property
    def executors(self) -> tuple[str, ...]:
        """Those of a server for which none is named: submitted code runs as the server's user."""
        return (NONE,) if self.behind_proxy or self.host not in LOOPBACK else (LOCAL,)


def serve(
    database: Database,
    where: Where,
    version: str,
    say: Callable[[str, str | None], None],
    executors: Sequence[str] = (),
) -> None:
    """Serve until a signal says stop; requests that are being answered are answered first.

    Args:
        say: told once, with the address, and the first admin's token where it was made now.
        executors: what starts jobs, as `open_executors` takes them; by default see `Where`.

    Raises:
        UsageError: the address cannot be had, or there is no such executor.
        StoreError: the database cannot be used.
    """
    keep_private()
    made: list[str] = []

    def first(session: Session) -> None:
        made.append(tokens.make(session, "first admin", "admin", None, None)[1])

    _allow_connections()
    starters = open_executors(executors or where.executors, database.url)
    with contextlib.closing(_listening(where)) as listening, contextlib.closing(database):
        database.start(first)
        reconciler = Reconciler(database, starters, _for_workers(where, listening))
        service = Service(
            database,
            Reader(KeyRing.from_environment(), refusal),
            behind_proxy=where.behind_proxy,
            machines=reconciler.machines,
        )
        # uvicorn raises the signal that stopped it again when it is done; nothing is left then.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        say(_address(where, listening), made[0] if made else None)
        _run(service, reconciler, _config(service, version), listening)


def _run(
    service: Service, reconciler: Reconciler, config: uvicorn.Config, listening: socket.socket
) -> None:
    """Answer, with all threads, until a signal comes."""
    starts = Loop("reconciler", reconcile.EVERY_S, reconciler.turn)
    counts = Loop("lookup counter", _COUNTS_S, lambda: service.lookups.flush(service.database))
    tidies = Loop("upkeep", upkeep.EVERY_S, lambda: upkeep.tidy(service))
    service.loops += [starts, counts, tidies]

    def last() -> None:
        """Comes while workers can still report."""
        starts.close()
        reconciler.close()

    for loop in service.loops:
        loop.start()
    try:
        Server(config, service.stopping, last).run(sockets=[listening])
    finally:
        service.stopping.set()
        for loop in service.loops:
            loop.close()
        counts.once()


def _config(service: Service, version: str) -> uvicorn.Config:
    return uvicorn.Config(
        application(service, version),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http="h11",  # bounds a head to 64 KiB
        ws="none",
        lifespan="off",
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_STOPS_S,
    )


def new_token(database: Database, name: str, role: str, days: int | None) -> str:
    """The text of a new token, made by whoever has the database itself.

    Raises:
        UsageError: the name or the role is invalid, or no server has used the database yet, which
            would then have no first admin. StoreError: the database cannot be used.
    """

    def refuse(_session: Session | None = None) -> None:
        raise UsageError(f"database {database.url}: no server has used it; run advisor serve first")

    if not database.there:
        refuse()
    database.start(refuse)
    try:
        with database.writing() as session:
            expires = None if days is None else time.time() + days * DAY_S
            return tokens.make(session, name, role, expires, None)[1]
    finally:
        database.close()


def _allow_connections() -> None:
    """Raise the limit of open files, which a shell often sets to 1,024."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS + _FILES
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if few != resource.RLIM_INFINITY and few < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _listening(where: Where) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        listening = socket.create_server((where.host, where.port), family=family, backlog=1024)
    except (OSError, OverflowError) as exc:
        why = getattr(exc, "strerror", "") or exc
        raise UsageError(f"--host {where.host} --port {where.port}: {why}") from exc
    # Connections inherit it. Without it, the body of an answer waits 40 ms after its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _for_workers(where: Where, listening: socket.socket) -> str:
    """Where workers find the server: by default on this machine."""
    every = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    near = dataclasses.replace(where, host=every.get(where.host, where.host))
    return where.url or _address(near, listening)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _address(where: Where, listening: socket.socket) -> str:
    host = f"[{where.host}]" if ":" in where.host else where.host
    return f"http://{host}:{listening.getsockname()[1]}"
