"""A server from start to stop: the socket, the threads, signals."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvicorn
from sqlalchemy.orm import Session

from advisor.cache.records import Records
from advisor.cache.signing import KeyRing
from advisor.errors import UsageError, reason
from advisor.open_store import refusal
from advisor.service import blobs, jobs, lookups, reconcile, tokens
from advisor.service.access import Service
from advisor.service.app import application
from advisor.service.database import DAY_S, Database
from advisor.service.executors import LOCAL, NONE, open_executors
from advisor.service.loop import Loop
from advisor.service.reconcile import Reconciler
from advisor.tuners.host import keep_private

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CONNECTIONS = 2000
_FILES = 500  # open files besides connections, at most
_IDLE_S = 75
_COUNTS_S = 30.0  # time between two writes of the counts of lookups, and of tokens' uses
_TIDIES_S = 3600.0
_STOPS_S = 10  # how long a server that stops waits for requests that it is answering


class Server(uvicorn.Server):
    """A uvicorn server that calls `last` before it ceases to answer requests."""

    def __init__(self, config: uvicorn.Config, last: Callable[[], None]) -> None:
        super().__init__(config)
        self._last = last

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._last)
        await super().shutdown(sockets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a server listens.

    Attributes:
        port: 0 for any free port.
        behind_proxy: only a proxy connects. The proxy encrypts, and names the client.
        url: the address for workers; '' if they can use the one on which the server listens.
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
                f"--host {self.host}: tokens would be sent unencrypted; put a proxy that encrypts "
                "in front of the server, and give --behind-proxy"
            )

    @property
    def executors(self) -> tuple[str, ...]:
        """The default executors: behind a proxy none, as jobs run as the server's user."""
        return (NONE,) if self.behind_proxy or self.host not in LOOPBACK else (LOCAL,)

    def listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listening = socket.create_server((self.host, self.port), family=family, backlog=1024)
        except (OSError, OverflowError) as exc:
            raise UsageError(f"--host {self.host} --port {self.port}: {reason(exc)}") from exc
        # Connections inherit this option. Without it, an answer's body comes 40 ms after its head.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening


def serve(
    database: Database,
    where: Where,
    version: str,
    say: Callable[[str, str | None], None],
    executors: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT, and finish the requests that are being answered.

    Args:
        say: called once with the address, and the first admin's token if it was made now.
        executors: texts for `open_executors`; by default those of `where`.
    """
    keep_private()
    made: list[str] = []

    def first(session: Session) -> None:
        made.append(tokens.make(session, "first admin", "admin", None, None)[1])

    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a shell often sets it to 1,024
    wanted = max(few, min(_CONNECTIONS + _FILES, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    starters = open_executors(executors or where.executors, database.url)
    with contextlib.closing(where.listen()) as listening, contextlib.closing(database):
        database.start(first)
        port = listening.getsockname()[1]
        # Workers find a server that listens on every address on this machine.
        near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(where.host, where.host)
        reconciler = Reconciler(database, starters, where.url or _address(near, port))
        service = Service(
            database,
            Records((), KeyRing.from_environment(), refusal),
            behind_proxy=where.behind_proxy,
            machines=reconciler.machines,
        )
        # After its end, uvicorn raises the signal that stopped it again. Ignore that signal.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        say(_address(where.host, port), made[0] if made else None)
        _run(service, reconciler, version, listening)


def _run(service: Service, reconciler: Reconciler, version: str, listening: socket.socket) -> None:
    """Start the threads, and answer requests until a signal comes."""
    starts = Loop("reconciler", reconcile.EVERY_S, reconciler.turn)
    counts = Loop("counter of lookups and uses", _COUNTS_S, service.flush)
    service.loops += [starts, counts, Loop("upkeep", _TIDIES_S, lambda: tidy(service))]

    def last() -> None:
        """Stop starting jobs, while workers can still report."""
        starts.close()
        reconciler.close()

    config = uvicorn.Config(
        application(service, version),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http="h11",  # limits a head to 64 KiB
        ws="none",
        lifespan="off",
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_STOPS_S,
    )
    for loop in service.loops:
        loop.start()
    try:
        Server(config, last).run(sockets=[listening])
    finally:
        for loop in service.loops:
            loop.close()
        counts.once()


def tidy(service: Service) -> None:
    """Remove old data that is no longer needed."""
    with service.database.writing() as session:
        for part in (tokens, jobs, blobs, lookups):
            part.tidy(session)


def new_token(database: Database, name: str, role: str, days: int | None) -> str:
    """Make a token with direct access to the database. Returns the token's text. Raises UsageError
    if no server has used the database yet: its first start makes the first admin."""

    def refuse(_session: object = None) -> None:
        raise UsageError(f"database {database.url}: no server has used it; run advisor serve first")

    if database.file and not database.file.exists():
        refuse()
    with contextlib.closing(database):
        database.start(refuse)
        expires = None if days is None else time.time() + days * DAY_S
        return database.write(tokens.make, name, role, expires, None)[1]


def _is_url(text: str) -> bool:
    with contextlib.suppress(ValueError):
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    return False


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
