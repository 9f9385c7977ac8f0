"""The default store: bytes under text keys in SQLite, through diskcache.

diskcache writes. A read-only connection of our own reads, because opening a diskcache writes, is
slow, fails in a read-only folder, and unpickles whatever a row says is a pickle (CVE-2025-69872).

A database is a program: views, triggers and computed columns run when it is read. Only the tables
and triggers that diskcache makes are accepted, every connection has a time limit, and no value is
fetched that is larger than a record can be.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.filesystem import REMEDY, check_folder, make_folder
from advisor.cache.stores.store import MAX_BYTES, is_blob
from advisor.cache.stores.timeout import check_deadline, time_left
from advisor.errors import RecordDamaged, StoreDamaged, StoreError

_RAW = 1  # diskcache's number for a value that stands in the row itself
_BUSY_S = 10.0
_WRITING_S = 60.0
"""What is put took minutes to measure: it waits longer for other writers than a reader does."""
_FORKING_S = 2.0
"""What a fork waits for another thread's statement."""
_STEPS = 10_000
"""Of SQLite's machine between two looks at the clock: well below a millisecond."""
_LONGEST = 4 * MAX_BYTES
"""Of any value or row that SQLite makes."""
_CORRUPT = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # a table or column of another program's database
    sqlite3.SQLITE_MISMATCH,
    None,  # raised by Python: a text that is no UTF-8
}
_OF_DISKCACHE = re.compile(
    r"CREATE TABLE (Settings|Cache) ?\(.*"
    r"|CREATE (UNIQUE )?INDEX Cache_\w+ ON Cache ?\([a-z_, ]+\)( WHERE [a-z_]+ IS NOT NULL)?"
    r"|CREATE TRIGGER Settings_\w+ (AFTER|BEFORE) (INSERT|UPDATE|DELETE) ON Cache FOR EACH ROW"
    r" BEGIN UPDATE Settings SET value = value( ?[+-] ?(1|NEW\.size|OLD\.size))+"
    r' WHERE key = "(count|size)"; END'
)
"""What it makes in a database, blanks as one."""
Rows = list[tuple[Any, ...]]


class DiskStore(DirStore):
    """disk:FOLDER. The database is in its folder records/; blobs lie as in `DirStore`."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.url = f"disk:{self.path}"
        self._records = self.path / "records"
        self._database = self._records / "cache.db"  # diskcache's name

    def keys(self) -> list[str]:
        sql = "SELECT key FROM Cache WHERE raw = 1 AND typeof(key) = 'text' ORDER BY key"
        return [key for (key,) in self._select(sql)]

    def get_many(
        self, keys: Iterable[str], most: int = MAX_BYTES
    ) -> dict[str, bytes | RecordDamaged]:
        wanted = [*keys]
        records = [key for key in wanted if not is_blob(key)]
        found = super().get_many((key for key in wanted if is_blob(key)), most)
        if not records:
            return found
        sql = (
            "SELECT key, mode, CASE WHEN length(value) <= ? THEN value END FROM Cache "
            "WHERE key = ? AND raw = 1 LIMIT 1"
        )
        limit = min(most, MAX_BYTES)
        rows = self._select(sql, *((limit, key) for key in records))
        return found | {key: _sound(key, mode, value) for key, mode, value in rows}

    def put(self, key: str, data: bytes) -> None:
        if is_blob(key):
            return super().put(key, data)
        with self._writing() as cache:
            cache.set(key, data)

    def delete(self, key: str) -> bool:
        if is_blob(key):
            return super().delete(key)
        if not self._select("SELECT 1 FROM Cache WHERE key = ? AND raw = 1", (key,)):
            return False
        with self._writing() as cache:
            return bool(cache.delete(key))

    def check_writable(self) -> None:
        if problem := self._problem():
            raise self._damaged(problem)
        if not os.path.lexists(self._database):
            # Nothing is made yet: a command that is refused later leaves nothing behind.
            return check_folder(self.path, self._records)
        with self._writing():
            pass

    def quarantine(self) -> Path:
        made = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        with self._errors():
            return self._records.rename(self.path / f"records.damaged-{made}")

    def _problem(self) -> str:
        """What is wrong with the database, or ''."""
        rows = self._select("PRAGMA quick_check(1)")
        return str(rows[0][0]).splitlines()[-1] if rows and rows[0][0] != "ok" else ""

    def _select(self, sql: str, *values: tuple[str | int, ...]) -> Rows:
        """The rows of a statement, run with each of these values, on one connection."""
        found: Rows = []
        with self._errors(), _one_at_a_time():
            try:
                with contextlib.closing(self._reader()) as reader:
                    for one in values or ((),):
                        found += reader.execute(sql, one)
                        check_deadline()
            except FileNotFoundError:
                return []
            except sqlite3.OperationalError as exc:
                if not str(exc).startswith("no such table"):
                    raise
                return []  # another process is just creating it
        return found

    def _reader(self) -> sqlite3.Connection:
        """A read-only connection to a database in which nothing is planted.

        Raises:
            FileNotFoundError: there is no database.
        """
        if not stat.S_ISREG(self._database.stat().st_mode):
            raise self._damaged("not a regular file")
        try:
            return self._connected("mode=ro")
        except sqlite3.OperationalError as exc:
            if os.access(self._records, os.W_OK):
                if _code(exc) != sqlite3.SQLITE_READONLY:
                    raise
                # Its first writer was killed: opening it to write undoes what that left.
                return self._connected("mode=rw")
            # SQLite keeps its lock files beside the database, which a read-only folder forbids.
            log = self._database.with_name("cache.db-wal")
            if log.exists() and log.stat().st_size > 0:
                raise StoreError(
                    f"cache {self.path}: its last writer was cut off and the folder is read-only; "
                    "run `advisor show` once where it can be written"
                ) from None
            return self._connected("mode=ro&immutable=1")

    def _connected(self, how: str) -> sqlite3.Connection:
        seconds = time_left(_BUSY_S)
        until = time.monotonic() + seconds
        connection = sqlite3.connect(
            f"{self._database.as_uri()}?{how}", uri=True, timeout=seconds, isolation_level=None
        )
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
            connection.execute("PRAGMA query_only = 1")
            if planted := _planted(connection):
                raise self._damaged(planted)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Any]:
        import diskcache

        cache = None
        with _one_at_a_time(), self._errors():
            try:
                make_folder(self._records)
                with contextlib.suppress(FileNotFoundError):
                    self._reader().close()  # refuses what would run when something is written
                cache = diskcache.Cache(
                    str(self._records),
                    timeout=time_left(_WRITING_S),
                    disk=_disk_class(),
                    eviction_policy="none",
                    cull_limit=0,
                    disk_min_file_size=2**40,  # never a file: a row is whole or absent
                    sqlite_mmap_size=0,  # a truncated file would kill the process (SIGBUS)
                    sqlite_synchronous=2,  # FULL: what was put survives a power cut
                )
                yield cache
            except diskcache.Timeout as exc:
                raise self._locked() from exc
            except (TypeError, ValueError, KeyError, AttributeError, AssertionError) as exc:
                # diskcache takes its settings from the database.
                raise self._damaged(f"{type(exc).__name__}: {exc}") from exc
            finally:
                if cache is not None:
                    cache.close()
            self._fold()

    def _fold(self) -> None:
        """Fold the log into the database: closing it does not where another process reads."""
        with contextlib.suppress(sqlite3.Error):
            connection = sqlite3.connect(f"{self._database.as_uri()}?mode=rw", uri=True, timeout=0)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with super()._errors():
            try:
                yield
            except sqlite3.Error as exc:
                raise self._mapped(exc) from exc

    def _mapped(self, exc: Exception) -> StoreError:
        if not isinstance(exc, sqlite3.Error):
            return super()._mapped(exc)
        code = _code(exc)
        if code in _CORRUPT:
            return self._damaged(str(exc))
        if code == sqlite3.SQLITE_INTERRUPT:
            return StoreError(f"cache {self.path}: takes too long to read; {REMEDY}")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._locked()
        return StoreError(f"cache {self.path}: {exc}; {REMEDY}")

    def _locked(self) -> StoreError:
        return StoreError(f"cache {self.path}: locked by another process; try again")

    def _damaged(self, reason: str) -> StoreDamaged:
        return StoreDamaged(
            f"cache {self.path}: damaged ({reason}); `advisor tune` begins a new one", self._records
        )


def _planted(connection: sqlite3.Connection) -> str:
    """What in the database would run and was not made by diskcache, or ''."""
    listed = connection.execute(
        "SELECT type, substr(name, 1, 40), substr(sql, 1, 1000) FROM sqlite_master"
    )
    for kind, name, sql in listed.fetchall():
        if sql is not None and not _OF_DISKCACHE.fullmatch(" ".join(sql.split())):
            return f"a {kind} {name!r} that advisor did not make"
    columns = connection.execute("SELECT hidden FROM pragma_table_xinfo('Cache')")
    return "a computed column" if any(hidden for (hidden,) in columns) else ""


def _sound(key: str, mode: object, value: object) -> bytes | RecordDamaged:
    if value is None:
        return RecordDamaged(f"{key}: nothing, or larger than {MAX_BYTES} bytes; refused")
    if mode != _RAW or not isinstance(value, bytes):
        return RecordDamaged(f"{key}: refused, because advisor stores only bytes and this is not")
    return value


def _code(exc: sqlite3.Error) -> int | None:
    full: int | None = getattr(exc, "sqlite_errorcode", None)
    return full if full is None else full & 0xFF


_lock = threading.RLock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """One statement at a time in this process, and none while it forks: a lock that another thread
    holds then, SQLite's own included, is held in the child for ever."""
    lock = _lock
    if not lock.acquire(timeout=time_left(_BUSY_S)):
        raise StoreError("cache: another thread is still reading; try again")
    try:
        yield
    finally:
        lock.release()


def _release() -> None:
    with contextlib.suppress(RuntimeError):  # another thread held it all the time
        _lock.release()


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _lock.acquire(timeout=_FORKING_S),
        after_in_parent=_release,
        after_in_child=_renew,
    )


@functools.cache
def _disk_class() -> type[Any]:
    import diskcache  # here, because reading does without

    class FilelessDisk(diskcache.Disk):  # type: ignore[misc]
        """No value is in a file; a row that says otherwise is not obeyed."""

        def remove(self, file_path: object) -> None: ...

    return FilelessDisk
