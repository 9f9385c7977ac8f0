"""The database: SQLite for one machine, PostgreSQL for several servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import platformdirs
from sqlalchemy import Connection, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

from advisor.cache.stores.filesystem import make_folder, network
from advisor.errors import StoreError, UsageError, reason
from advisor.service import migrations

P = ParamSpec("P")
T = TypeVar("T")

DAY_S = 86_400.0
WAITS_S = 10  # timeout of a lock, a statement or a connection
_UPGRADES_S = 1800  # timeout of a change of the tables, in this server or another
_CONNECTIONS = 16
_STARTING = 0x61647669
"""An advisory lock, so that servers of one PostgreSQL start one after another."""
_NOW = {
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)",
}
_POSTGRESQL: dict[str, Any] = {
    "connect_timeout": WAITS_S // 2,
    "application_name": "advisor serve",
    "options": f"-c statement_timeout={WAITS_S}s -c lock_timeout={WAITS_S}s "
    f"-c idle_in_transaction_session_timeout={WAITS_S}s "
    # A reader sees one state in all its queries. A writer, which waits for locks, sees what
    # others committed meanwhile.
    r"-c default_transaction_isolation=repeatable\ read",
}


class Database:
    """Sessions on one database. Errors are raised as StoreError. Committed data is on disk.

    Attributes:
        url: for people, without its password.
        file: of SQLite; None for PostgreSQL.
    """

    def __init__(self, url: str | None = None) -> None:
        """Prepare the connections, but open none. Raises UsageError if the URL is not of SQLite or
        PostgreSQL, or SQLite's file is on a network."""
        parsed, self.file = _parsed(url)
        self.url = parsed.render_as_string(hide_password=True)
        self._engine = create_engine(
            parsed,
            connect_args={"timeout": WAITS_S} if self.file else _POSTGRESQL,
            pool_pre_ping=True,
            pool_size=_CONNECTIONS,
            max_overflow=0,
            pool_timeout=WAITS_S,
            hide_parameters=True,
        )
        if self.file:
            event.listen(self._engine, "connect", _on_connect)
            event.listen(self._engine, "begin", _on_begin)
        writes: dict[str, Any] = {} if self.file else {"isolation_level": "READ COMMITTED"}
        self._writer = self._engine.execution_options(writes=True, **writes)

    def start(self, first: Callable[[Session], None]) -> None:
        """Make or upgrade the tables, in one transaction; `first` fills a new database. Servers
        that start together wait for each other. Raises StoreError also if a newer advisor made it.
        """
        if self.file:
            try:
                make_folder(self.file.parent)
                self.file.touch(0o600)
                self.file.chmod(0o600)  # SQLite gives its -wal and -shm the same mode
            except OSError as exc:
                raise StoreError(f"database {self.url}: {reason(exc)}") from exc
        with self.writing() as session:
            connection = session.connection()
            if not self.file:
                for limit in ("lock_timeout", "statement_timeout"):
                    connection.execute(text(f"SET LOCAL {limit} = '{_UPGRADES_S}s'"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _STARTING})
            if migrations.upgrade(connection):
                first(session)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Session]:
        """Context manager: yields a session that sees one state and is not committed."""
        with self._mapped(), Session(self._engine) as session:
            yield session

    @contextlib.contextmanager
    def writing(self) -> Iterator[Session]:
        """Context manager: yields a session that commits at the end, or rolls back on errors."""
        with self._mapped(), Session(self._writer) as session, session.begin():
            yield session

    def read(self, do: Callable[Concatenate[Session, P], T], *args: P.args, **how: P.kwargs) -> T:
        """The result of `do(session, ...)` with a session as `reading` yields it."""
        with self.reading() as session:
            return do(session, *args, **how)

    def write(self, do: Callable[Concatenate[Session, P], T], *args: P.args, **how: P.kwargs) -> T:
        """The result of `do(session, ...)` with a session as `writing` yields it."""
        with self.writing() as session:
            return do(session, *args, **how)

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as exc:
            cause = getattr(exc, "orig", None) or exc
            why = (str(cause).splitlines() or [""])[0][:200] or type(cause).__name__
            raise StoreError(f"database {self.url}: {why}") from exc


def now(session: Session) -> float:
    """The database's time in Unix seconds: the clocks of several servers may differ."""
    return float(session.execute(text(_NOW[session.get_bind().dialect.name])).scalar_one())


def _parsed(url: str | None) -> tuple[URL, Path | None]:
    """Returns (the URL, the file of SQLite)."""
    own = platformdirs.user_data_path("advisor", appauthor=False) / "service.db"
    try:
        parsed = make_url(URL.create("sqlite", database=str(own)) if url is None else url)
    except ArgumentError as exc:
        raise _wrong("this is no URL of a database") from exc
    if parsed.drivername == "postgresql+psycopg":
        return parsed, None
    if parsed.drivername != "sqlite":
        raise _wrong(parsed.drivername)
    if parsed.query:
        raise _wrong("a URL of SQLite takes no options")
    if parsed.database in (None, "", ":memory:"):
        raise _wrong("the URL names no file")
    path = Path(str(parsed.database)).absolute()
    if kind := network(path):
        raise UsageError(f"--database {path}: is on {kind}, where SQLite corrupts; use PostgreSQL")
    return parsed, path


def _wrong(why: str) -> UsageError:
    expected = "sqlite:////absolute/file.db or postgresql+psycopg://USER:PASSWORD@HOST/NAME"
    return UsageError(f"--database: {why}; expected {expected}")


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # `_on_begin` begins transactions
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _on_begin(connection: Connection) -> None:
    """Begin a transaction. A writer locks at once, because after a read it could not wait."""
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
