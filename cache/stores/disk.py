"""The default store: an SQLite database that diskcache makes; and packs, which are such a database.

Rows are read and written on connections of our own, because diskcache is slow to open, fails in a
read-only folder, and unpickles any row that is marked as a pickle (CVE-2025-69872).

Views, triggers and computed columns run when a database is used. So only what diskcache makes is
accepted, every connection has a time limit, and no value larger than a record is fetched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.filesystem import REMEDY, WRITING, check_folder, make_folder
from advisor.cache.stores.store import BLOBS, MAX_BYTES, ByKey, is_blob
from advisor.cache.stores.timeout import check_deadline, time_left
from advisor.errors import RecordDamaged, StoreDamaged, StoreError, reason

_READ_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 60.0  # for other writers: a record took minutes to measure
_STEPS = 10_000  # of SQLite's machine between two looks at the clock: below a millisecond
_MAX_VALUE = 4 * MAX_BYTES  # most bytes of any value or row that SQLite makes
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
"""SQL of everything that diskcache makes in a database, with single blanks. Its mode 1 means that a
value is bytes in the row itself."""
_KEYS = "SELECT key FROM Cache WHERE raw = 1 AND typeof(key) = 'text' ORDER BY key"
_GET = (
    "SELECT key, CASE WHEN length(value) <= ? AND mode = 1 AND typeof(value) = 'blob' THEN value "
    "END FROM Cache WHERE key = ? AND raw = 1 LIMIT 1"
)
_PUT = (
    "INSERT INTO Cache (key, raw, store_time, mode, size, value) VALUES (?, 1, ?, 1, ?, ?) "
    "ON CONFLICT (key, raw) DO UPDATE SET store_time = excluded.store_time, mode = excluded.mode, "
    "size = excluded.size, value = excluded.value, filename = NULL"
)
_lock = threading.RLock()
"""Held for each statement, and while this process forks. Otherwise a child could never take a lock
of SQLite that another thread held during the fork."""


class DiskStore(DirStore):
    """disk:FOLDER. The database is in its folder records/; blobs lie as in `DirStore`."""

    _faults = (OSError, sqlite3.Error, UnicodeDecodeError)  # a message may quote any bytes
    _may_be_absent = True

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.url = f"disk:{self.path}"
        self._records = self.path / "records"
        self._database = self._records / "cache.db"  # diskcache's name

    def keys(self) -> list[str]:
        return [key for (key,) in self._select(_KEYS)]

    def get_many(self, keys: Iterable[str], most: int = MAX_BYTES) -> ByKey:
        wanted = [*keys]
        found = super().get_many((key for key in wanted if is_blob(key)), most)
        if records := [(min(most, MAX_BYTES), key) for key in wanted if not is_blob(key)]:
            refused = f"no bytes, or larger than {MAX_BYTES}; refused"
            for key, value in self._select(_GET, *records):
                found[key] = RecordDamaged(f"{key}: {refused}") if value is None else value
        return found

    def put(self, key: str, data: bytes) -> None:
        if is_blob(key):
            return super().put(key, data)
        self.put_all([(key, data)])

    def put_all(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Store the data of several records, or of none if it fails."""
        rows = ((key, time.time(), len(data), data) for key, data in records)
        with self._errors(), _lock:
            if not self._select("SELECT 1 FROM sqlite_master WHERE name = 'Cache_key_raw'"):
                self._create()
            with self._writing() as database:
                database.executemany(_PUT, rows)

    def delete(self, key: str) -> bool:
        if is_blob(key):
            return super().delete(key)
        if not self._select(_GET, (0, key)):
            return False
        with self._writing() as database:
            gone = database.execute("DELETE FROM Cache WHERE key = ? AND raw = 1", (key,))
            return gone.rowcount > 0

    def check_writable(self) -> None:
        rows = self._select("PRAGMA quick_check(1)")
        if rows and rows[0][0] != "ok":
            raise self._damaged(str(rows[0][0]).splitlines()[-1])
        if not os.path.lexists(self._database):
            # Make nothing yet, so that a command that is refused later leaves nothing behind.
            return check_folder(self.path, self._records)
        with self._writing() as database:
            database.execute("BEGIN IMMEDIATE")

    def quarantine(self) -> Path:
        made = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        with self._errors():
            return self._records.rename(self.path / f"records.damaged-{made}")

    def _select(self, sql: str, *values: tuple[str | int, ...]) -> list[tuple[Any, ...]]:
        """The rows of a statement, run with each of these values, on one connection."""
        found: list[tuple[Any, ...]] = []
        with self._errors(), _lock:
            try:
                with contextlib.closing(self._reader()) as reader:
                    for one in values or ((),):
                        found += reader.execute(sql, one)
                        check_deadline()
            except (FileNotFoundError, sqlite3.OperationalError) as exc:
                # Another process may just be creating it.
                absent = isinstance(exc, OSError) or str(exc).startswith("no such table")
                if not absent or not self._may_be_absent:
                    raise
                return []
        return found

    def _reader(self) -> sqlite3.Connection:
        try:
            return self._connected("mode=ro", _READ_TIMEOUT_S)
        except sqlite3.OperationalError as exc:
            if os.access(self._records, os.W_OK):
                if _code(exc) != sqlite3.SQLITE_READONLY:
                    raise
                # Its first writer was killed: opening the database for writing rolls that back.
                return self._connected("mode=rw", _READ_TIMEOUT_S)
            # SQLite puts its lock files next to the database, which a read-only folder forbids.
            log = self._database.with_name("cache.db-wal")
            if log.exists() and log.stat().st_size > 0:
                raise StoreError(
                    f"cache {self.path}: its last writer was cut off and the folder is read-only; "
                    "run `advisor show` once where it can be written"
                ) from None
            return self._connected("mode=ro&immutable=1", _READ_TIMEOUT_S)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Context manager: yields a connection to the existing database, in a transaction."""
        with (
            self._errors(),
            _lock,
            contextlib.closing(self._connected("mode=rw", _WRITE_TIMEOUT_S)) as database,
        ):
            with database:
                yield database
            # Fold the log into the database: closing does not, if another process reads.
            database.execute("PRAGMA busy_timeout = 0")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _connected(self, how: str, most_s: float) -> sqlite3.Connection:
        """Connect to the existing database, and check that nothing is planted in it."""
        if not stat.S_ISREG(self._database.stat().st_mode):
            raise self._damaged("not a regular file")
        seconds = time_left(most_s)
        until = time.monotonic() + seconds
        uri = f"{self._database.as_uri()}?{how}"
        database = sqlite3.connect(uri, uri=True, timeout=seconds)
        database.text_factory = lambda raw: raw.decode(errors="replace")  # others may have written
        try:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE)
            database.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
            if planted := _planted(database):
                raise self._damaged(planted)
            database.execute("PRAGMA synchronous = FULL")  # written data survives a power cut
        except BaseException:
            database.close()
            raise
        return database

    def _create(self) -> None:
        """Make the database, or complete one whose first writer was killed."""
        import diskcache  # here, because an import takes as long as a lookup

        make_folder(self._records)
        try:
            # No mmap: a mapped file that is truncated would kill the process.
            diskcache.Cache(str(self._records), eviction_policy="none", sqlite_mmap_size=0).close()
        except (TypeError, ValueError, KeyError, AttributeError, AssertionError) as exc:
            # diskcache reads its settings from the database, which may be damaged.
            raise self._damaged(f"{type(exc).__name__}: {exc}") from exc

    def _mapped(self, exc: Exception) -> StoreError:
        if isinstance(exc, OSError):
            return super()._mapped(exc)
        code = _code(exc)
        if code in _CORRUPT:
            return self._damaged(str(exc))
        if code == sqlite3.SQLITE_INTERRUPT:
            return StoreError(f"cache {self.path}: takes too long to read; {REMEDY}")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreError(f"cache {self.path}: locked by another process; try again")
        return StoreError(f"cache {self.path}: {exc}; {REMEDY}")

    def _damaged(self, reason: str) -> StoreDamaged:
        return StoreDamaged(
            f"cache {self.path}: damaged ({reason}); to begin a new one, move {self._records} "
            "away, as the next `advisor tune` does"
        )


class PackStore(DiskStore):
    """pack:FILE, read-only: a database of records in one file, to carry elsewhere."""

    _may_be_absent = False

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.url = f"pack:{self.path}"
        self.studies = None
        self._database = self.path

    def sizes(self, prefix: str = BLOBS) -> dict[str, int]:
        return {}

    def put(self, key: str, data: bytes) -> NoReturn:
        self._writing()

    def _writing(self) -> NoReturn:
        raise StoreError(f"cache {self.url}: a pack is read-only; `advisor export` writes one")

    def _reader(self) -> sqlite3.Connection:
        return self._connected("mode=ro&immutable=1", _READ_TIMEOUT_S)

    def _damaged(self, reason: str) -> StoreDamaged:
        return StoreDamaged(
            f"{self.path}: no pack of advisor's, or damaged ({reason}); export it again"
        )


def write_pack(path: Path, parts: Iterable[Iterable[tuple[str, bytes]]]) -> None:
    """Write records into a pack, which is whole or absent. They come in parts, each of which fits
    into memory. Raises StoreError if the file cannot be written."""
    try:
        with TemporaryDirectory(dir=path.absolute().parent, prefix=WRITING) as folder:
            made = DiskStore(folder)
            made.put_all(())
            for part in parts:
                made.put_all(part)
            made._database.replace(path)
    except (OSError, StoreError) as exc:
        cause = exc.__cause__ or exc  # what SQLite said, without the name of a temporary folder
        raise StoreError(f"pack {path}: {reason(cause)}") from exc


def _planted(database: sqlite3.Connection) -> str:
    """The first thing in the database that would run and that diskcache did not make, or ''."""
    listed = database.execute(
        "SELECT type, substr(name, 1, 40), substr(sql, 1, 1000) FROM sqlite_master"
    )
    for kind, name, sql in listed.fetchall():
        if sql is not None and not _OF_DISKCACHE.fullmatch(" ".join(sql.split())):
            return f"a {kind} {name!r} that advisor did not make"
    columns = database.execute("SELECT hidden FROM pragma_table_xinfo('Cache')")
    return "a computed column" if any(hidden for (hidden,) in columns) else ""


def _code(exc: Exception) -> int | None:
    full = getattr(exc, "sqlite_errorcode", None)
    return full & 0xFF if isinstance(full, int) else None


def _release() -> None:
    with contextlib.suppress(RuntimeError):  # the fork timed out: another thread holds the lock
        _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _lock.acquire(timeout=2.0),  # another thread's statement may take longer
        after_in_parent=_release,
        after_in_child=_release,
    )
