"""A server from its first line to its last: the socket, TLS, signals."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from sqlalchemy.orm import Session
from uvicorn.protocols.http.h11_impl import H11Protocol

from advisor.cache.reader import Reader
from advisor.cache.seal import Seal
from advisor.errors import UsageError
from advisor.opening import refusal
from advisor.service import tokens
from advisor.service.access import Service
from advisor.service.app import application
from advisor.service.database import DAY_S, Database
from advisor.service.executors.schemes import LOCAL, NONE, open_executors
from advisor.service.reconcile import Reconciler
from advisor.service.upkeep import upkeep
from advisor.tuners.host import keep_private

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CONNECTIONS = 2000
_FILES = 500
"""Open at most, beside connections."""
_IDLE_S = 75
_STUCK_S = 10.0
"""For the head of a request to come, and for any of an answer to be read."""
_STOPS_S = 10
"""For requests that are being answered when the server is told to stop."""
_LEAVES_S = 0.05


class Server(uvicorn.Server):
    """One that waits for answers, and not for idle clients, who over TLS had to take leave, nor for
    those that say nothing, or half of what they want, or do not listen."""

    def __init__(
        self,
        config: uvicorn.Config,
        stopping: threading.Event,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._stopping, self._last = stopping, last
        self._stuck: dict[tuple[H11Protocol, object, int], float] = {}

    async def on_tick(self, counter: int) -> bool:
        self._drop_stuck()
        return await super().on_tick(counter)

    def _drop_stuck(self) -> None:
        """uvicorn waits without end for a first request, for the rest of any head, and for a client
        to read its answer."""
        at = time.monotonic()
        stuck = [
            (one, one.cycle, unread)
            for one in self.server_state.connections
            if isinstance(one, H11Protocol)
            and ((unread := one.transport.get_write_buffer_size()) or _asks_nothing(one))
        ]
        self._stuck = {one: self._stuck.get(one, at) for one in stuck}
        for (connection, _cycle, _unread), since in self._stuck.items():
            if at - since > _STUCK_S:
                connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._last)
        self._leave()
        await super().shutdown(sockets)

    def _leave(self) -> None:
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if not self.server_state.tasks and not transport.get_write_buffer_size():
                transport.abort()
        if self.server_state.connections:
            asyncio.get_running_loop().call_later(_LEAVES_S, self._leave)


def _asks_nothing(one: H11Protocol) -> bool:
    """Nor is it one that has been answered, which uvicorn itself closes in time."""
    return one.timeout_keep_alive_task is None and (
        one.cycle is None or one.cycle.response_complete
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a server listens, and who encrypts.

    Attributes:
        port: 0 for any that is free.
        tls_cert, tls_key: PEM files, both or none.
        behind_proxy: nobody but a proxy connects, which encrypts and says who the client is.
        url: where workers find it; '' for where it listens.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: bool = False
    url: str = ""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together; give both")
        if self.url and not _is_url(self.url):
            raise UsageError(f"--url {self.url[:80]!r}: expected http[s]://HOST[:PORT][/PATH]")
        if self.host not in LOOPBACK and not (self.tls or self.behind_proxy):
            raise UsageError(
                f"--host {self.host}: tokens would travel in the clear; give --tls-cert and "
                "--tls-key, or --behind-proxy where one encrypts"
            )

    @property
    def executors(self) -> tuple[str, ...]:
        """Those of a server for which none is named: submitted code runs as the server's user."""
        return (NONE,) if self.behind_proxy or self.host not in LOOPBACK else (LOCAL,)

    @property
    def tls(self) -> bool:
        return self.tls_cert is not None


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
        UsageError: the address cannot be had, the certificate not be used, or an executor is none.
        StoreError: the database cannot be used.
    """
    keep_private()
    made: list[str] = []

    def first(session: Session) -> None:
        made.append(tokens.make(session, "first admin", "admin", None, None)[1])

    _allow_connections()
    context = _context(where)
    starters = open_executors(executors or where.executors, database.url)
    listening = _listening(where)
    try:
        database.start(first)
        reader = Reader(Seal.from_environment(), refusal)
        service = Service(
            database,
            reader,
            behind_proxy=where.behind_proxy,
            tls=where.tls,
        )
        config = uvicorn.Config(
            application(service, version),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            http="h11",  # bounds a head to 64 KiB, and `Server` knows it
            ws="none",
            lifespan="off",
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_STOPS_S,
            ssl_context_factory=None if context is None else lambda *_: context,
        )
        reconciler = Reconciler(database, starters, _for_workers(where, listening))
        # What stopped it uvicorn raises again when it is done, and nothing is left to do then.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        say(_address(where, listening), made[0] if made else None)
        reconciler.loop.start()
        service.loops.append(reconciler.loop)
        with upkeep(service):
            Server(config, service.stopping, reconciler.close).run(sockets=[listening])
    finally:
        listening.close()
        database.close()


def new_token(database: Database, name: str, role: str, days: int | None) -> str:
    """A token made by who has the database itself; its text.

    Raises:
        UsageError: the name or the role is none, or no server has used the database yet, which
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


def _context(where: Where) -> ssl.SSLContext | None:
    if where.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(where.tls_cert, where.tls_key)
    except OSError as exc:  # ssl's own errors too
        raise UsageError(f"--tls-cert {str(where.tls_cert)!r}: {exc.strerror or exc}") from exc
    return context


def _allow_connections() -> None:
    """As many as are served: of open files a shell often allows 1,024."""
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
    # Connections inherit it. Else an answer's body waits 40 ms, for who has its head to say so.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _for_workers(where: Where, listening: socket.socket) -> str:
    """Where workers find the server: by itself, on this machine."""
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
    return f"{'https' if where.tls else 'http'}://{host}:{listening.getsockname()[1]}"
