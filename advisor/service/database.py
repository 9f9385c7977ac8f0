"""The database: SQLite for one machine, PostgreSQL for several servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
from sqlalchemy import Connection, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

from advisor.cache.stores.filesystem import make_folder, network
from advisor.errors import StoreError, UsageError
from advisor.service import migrations

WAITS_S = 10
"""For a lock, a statement or a connection."""
_UPGRADES_S = 1800
"""For the tables to be changed, by this server or by another."""
_CONNECTIONS = 16
_STARTING = 0x61647669
"""The advisory lock that PostgreSQL's servers start under, one after another."""
_FORMS = "sqlite:////absolute/file.db or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"


class Database:
    """Sessions on one database. What was committed is on disk.

    Attributes:
        url: for people, without its password.
    """

    def __init__(self, url: str | None = None) -> None:
        """Opens nothing yet.

        Raises:
            UsageError: it is no URL of SQLite or PostgreSQL, or SQLite would corrupt there.
        """
        parsed = _parsed(url)
        self.url = parsed.render_as_string(hide_password=True)
        self._lite = parsed.drivername == "sqlite"
        if self._lite:
            self._path = _file_of(parsed)
        arguments: dict[str, Any] = {"timeout": WAITS_S} if self._lite else _POSTGRESQL
        self._engine = create_engine(
            parsed,
            connect_args=arguments,
            pool_pre_ping=True,
            pool_size=_CONNECTIONS,
            max_overflow=0,
            pool_timeout=WAITS_S,
            hide_parameters=True,
        )
        if self._lite:
            event.listen(self._engine, "connect", _on_connect)
            event.listen(self._engine, "begin", _on_begin)
        writes: dict[str, Any] = {} if self._lite else {"isolation_level": "READ COMMITTED"}
        self._writer = self._engine.execution_options(writes=True, **writes)

    @property
    def there(self) -> bool:
        """False for an SQLite file that nobody made yet."""
        return not self._lite or self._path.exists()

    def start(self, first: Callable[[Session], None]) -> None:
        """Make what is missing, or upgrade what a version before made; where nothing was there,
        `first` fills it. All in one transaction, in which one server at a time is.

        Raises:
            StoreError: it cannot be reached or written, or a newer version of advisor made it.
        """
        if self._lite:
            try:
                make_folder(self._path.parent)
                self._path.touch(0o600)
                self._path.chmod(0o600)  # which SQLite gives to its -wal and -shm too
            except OSError as exc:
                raise StoreError(f"database {self.url}: {exc.strerror or exc}") from exc
        with self.writing() as session:
            connection = session.connection()
            if not self._lite:
                for limit in ("lock_timeout", "statement_timeout"):
                    connection.execute(text(f"SET LOCAL {limit} = '{_UPGRADES_S}s'"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _STARTING})
            there = migrations.revision_of(connection)
            if there > migrations.LAST:
                raise StoreError(
                    f"database {self.url}: schema {int(there)} is newer than "
                    f"{int(migrations.LAST)}, which this version knows; upgrade advisor"
                )
            if there < migrations.LAST:
                migrations.upgrade(connection)
            if not there:
                first(session)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that sees one state, that of its first query, and keeps nothing.

        Raises:
            StoreError: the database does not answer.
        """
        with self._mapped(), Session(self._engine) as session:
            yield session

    @contextlib.contextmanager
    def writing(self) -> Iterator[Session]:
        """A session whose work is kept, whole, when it is left without an error.

        Raises:
            StoreError: the database does not answer, or takes nothing.
        """
        with self._mapped(), Session(self._writer) as session, session.begin():
            yield session

    def check(self) -> None:
        """Raise StoreError where the database does not answer."""
        with self.reading() as session:
            session.execute(text("SELECT version_num FROM alembic_version"))

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as exc:
            why = getattr(exc, "orig", None) or exc
            reason = (str(why).splitlines() or [""])[0][:200] or type(why).__name__
            raise StoreError(f"database {self.url}: {reason}") from exc


DAY_S = 86_400.0


_NOW = {
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)",
}


def now(session: Session) -> float:
    """The time by the database's clock, in Unix seconds: those of several servers differ."""
    return float(session.execute(text(_NOW[session.get_bind().dialect.name])).scalar_one())


_POSTGRESQL: dict[str, Any] = {
    "connect_timeout": WAITS_S // 2,
    "application_name": "advisor serve",
    "options": f"-c statement_timeout={WAITS_S}s -c lock_timeout={WAITS_S}s "
    f"-c idle_in_transaction_session_timeout={WAITS_S}s "
    # For readers, as SQLite's have it: what several queries find goes together. A writer, which
    # waits for others' locks, has to see what they did.
    r"-c default_transaction_isolation=repeatable\ read",
}


def _parsed(url: str | None) -> URL:
    if url is None:
        file = platformdirs.user_data_path("advisor", appauthor=False) / "service.db"
        return URL.create("sqlite", database=str(file))
    try:
        parsed = make_url(url)
    except ArgumentError as exc:
        raise UsageError(f"--database: no URL of a database; expected {_FORMS}") from exc
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise UsageError(f"--database: {parsed.drivername}: expected {_FORMS}")
    if parsed.drivername == "sqlite" and parsed.query:
        raise UsageError(f"--database: options of SQLite are not known; expected {_FORMS}")
    return parsed


def _file_of(url: URL) -> Path:
    if url.database in (None, "", ":memory:"):
        raise UsageError(f"--database: names no file; expected {_FORMS}")
    path = Path(str(url.database)).absolute()
    if kind := network(path):
        raise UsageError(f"--database {path}: is on {kind}, where SQLite corrupts; use PostgreSQL")
    return path


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # this module says where a transaction begins
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _on_begin(connection: Connection) -> None:
    """A writer takes its lock at once: one that read before could not wait for it."""
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
