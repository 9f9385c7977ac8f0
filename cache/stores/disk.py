"""The default store: SQLite through diskcache, holding bytes under text keys and nothing else.

diskcache writes; a read-only connection of our own reads, because opening a diskcache writes, is
slow, fails in a read-only folder, and unpickles whatever a row says is a pickle (CVE-2025-69872).

A database is a program: views, triggers and computed columns run when it is read. Only the tables
and triggers that diskcache makes are accepted, every statement has a time limit, and no value is
fetched that is larger than a record can be.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.filesystem import check_folder, make_folder, place
from advisor.cache.stores.store import BLOBS, MAX_BYTES, Store, is_blob
from advisor.cache.stores.timeout import check_deadline, time_left
from advisor.errors import RecordDamaged, StoreDamaged, StoreError

_DATABASE = "cache.db"  # diskcache's name
_RAW = 1  # diskcache's number for a value that stands in the row as it is
_BUSY_S = 10.0
_WRITING_S = 60.0
"""What is put took minutes to measure: it waits longer for other writers than a reader does."""
_FORKING_S = 2.0
"""What a fork waits for another thread's statement."""
_STEPS = 10_000
"""Of SQLite's machine between two looks at the clock: well below a millisecond."""
_LONGEST = 4 * MAX_BYTES
"""Of any value or row that SQLite makes."""
_REMEDY = "point --cache or ADVISOR_CACHE to another folder"

_CORRUPT = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # a table or column of another program's database
    sqlite3.SQLITE_MISMATCH,
    None,  # raised by Python: a text that is no UTF-8
}
Rows = list[tuple[Any, ...]]


class DiskStore(Store):
    """disk:FOLDER. The database is in its folder records/; blobs lie as in `DirStore`."""

    def __init__(self, path: str | Path) -> None:
        self.path = place(path)
        self.url = f"disk:{self.path}"
        self.studies = self.path / "studies"
        self._blobs = DirStore(self.path)
        self._records = self.path / "records"
        self._database = self._records / _DATABASE

    def keys(self) -> list[str]:
        sql = "SELECT key FROM Cache WHERE raw = 1 AND typeof(key) = 'text' ORDER BY key"
        return [key for (key,) in self._select(sql)]

    def sizes(self, start: str = BLOBS) -> dict[str, int]:
        return self._blobs.sizes(start)

    def get(self, key: str, most: int = MAX_BYTES) -> bytes | None:
        if is_blob(key):
            return self._blobs.get(key, most)
        found = self.get_many([key]).get(key)
        if isinstance(found, RecordDamaged):
            raise found
        return found

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        sql = (
            "SELECT key, mode, CASE WHEN length(value) <= ? THEN value END FROM Cache "
            "WHERE key = ? AND raw = 1 LIMIT 1"
        )
        rows = self._select(sql, *((MAX_BYTES, key) for key in keys))
        return {key: _sound(key, mode, value) for key, mode, value in rows}

    def put(self, key: str, data: bytes) -> None:
        if is_blob(key):
            return self._blobs.put(key, data)
        with self._writing() as cache:
            cache.set(key, data)

    def delete(self, key: str) -> bool:
        if is_blob(key):
            return self._blobs.delete(key)
        if not self._select("SELECT 1 FROM Cache WHERE key = ? AND raw = 1", (key,)):
            return False
        with self._writing() as cache:
            return bool(cache.delete(key))

    def check_writable(self) -> None:
        problem = self._problem()
        if problem:
            raise self._damaged(problem)
        try:
            there = self._database.exists()
        except OSError as exc:
            raise self._mapped(exc) from exc
        if not there:
            # Nothing is made yet: a command that is refused later leaves nothing behind.
            return check_folder(self.path, self._records)
        with self._writing():
            pass

    def is_read_only(self) -> bool:
        return not all(os.access(path, os.W_OK) for path in (self._records, self._database))

    def health(self) -> str:
        with contextlib.suppress(StoreError):  # what is wrong is found again below
            if problem := self._problem():
                return f"damaged: {problem}"
            sql = "SELECT count(*) FROM Cache WHERE raw != 1 OR mode != 1 OR typeof(key) != 'text'"
            if foreign := sum(count for (count,) in self._select(sql)):
                return f"damaged: {foreign} rows that advisor did not write; they are ignored"
        return super().health()

    def quarantine(self) -> Path:
        stem = f"records.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
        aside = self.path / stem
        number = 1
        while aside.exists():
            number += 1
            aside = self.path / f"{stem}-{number}"
        try:
            return self._records.rename(aside)
        except OSError as exc:
            raise StoreError(
                f"cache {self.path}: cannot move the damaged store aside ({exc}); {_REMEDY}"
            ) from exc

    def leftovers(self) -> list[Path]:
        return self._blobs.leftovers()

    def _problem(self) -> str:
        """What is wrong with the database, or ''."""
        rows = self._select("PRAGMA quick_check(1)")
        return str(rows[0][0]).splitlines()[-1] if rows and rows[0][0] != "ok" else ""

    def _select(self, sql: str, *values: tuple[str | int, ...]) -> Rows:
        """The rows of a statement, run with each of these values, on one connection."""
        found: Rows = []
        try:
            with _GATE, contextlib.closing(self._reader()) as reader:
                for number, one in enumerate(values or ((),)):
                    if number:
                        check_deadline()
                    found += reader.rows(sql, one)
        except FileNotFoundError:
            return []
        except sqlite3.OperationalError as exc:
            if str(exc).startswith("no such table"):
                return []  # another process is just creating it
            raise self._mapped(exc) from exc
        except (sqlite3.Error, OSError) as exc:
            raise self._mapped(exc) from exc
        return found

    def _reader(self) -> _Reader:
        """Raises FileNotFoundError if there is no database."""
        if not stat.S_ISREG(self._database.stat().st_mode):
            raise self._damaged("not a regular file")
        reader = _Reader(self._database)
        if reader.planted:
            reader.close()
            raise self._damaged(reader.planted)
        return reader

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Any]:
        with _GATE:
            with self._cache() as cache:
                yield cache
            self._fold()

    def _fold(self) -> None:
        """Fold the log into the database: closing it does not where another process reads."""
        with contextlib.suppress(sqlite3.Error):
            connection = sqlite3.connect(f"{self._database.as_uri()}?mode=rw", uri=True, timeout=0)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()

    @contextlib.contextmanager
    def _cache(self) -> Iterator[Any]:
        import diskcache

        cache = None
        try:
            make_folder(self._records)
            with contextlib.suppress(FileNotFoundError):
                self._reader().close()  # refuses what would run when something is written
            cache = diskcache.Cache(
                str(self._records),
                timeout=time_left(_WRITING_S),
                disk=_bytes_disk(),
                eviction_policy="none",
                cull_limit=0,
                disk_min_file_size=2**40,  # never a file: a row is whole or absent
                sqlite_mmap_size=0,  # a truncated file would kill the process (SIGBUS)
                sqlite_synchronous=2,  # FULL: what was put survives a power cut
            )
            yield cache
        except diskcache.Timeout as exc:
            raise StoreError(f"cache {self.path}: locked by another process; try again") from exc
        except (sqlite3.Error, OSError) as exc:
            raise self._mapped(exc) from exc
        except (TypeError, ValueError, KeyError, AttributeError, AssertionError) as exc:
            # diskcache takes its settings from the database.
            raise self._damaged(f"{type(exc).__name__}: {exc}") from exc
        finally:
            if cache is not None:
                cache.close()

    def _damaged(self, reason: str) -> StoreDamaged:
        return StoreDamaged(
            f"cache {self.path}: damaged ({reason}); `advisor tune` begins a new one", self._records
        )

    def _mapped(self, exc: sqlite3.Error | OSError) -> StoreError:
        if isinstance(exc, OSError):
            return self._blobs.error(exc)
        code = _code(exc)
        if code in _CORRUPT:
            return self._damaged(str(exc))
        if code == sqlite3.SQLITE_INTERRUPT:
            return StoreError(f"cache {self.path}: takes too long to read; {_REMEDY}")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreError(f"cache {self.path}: locked by another process; try again")
        return StoreError(f"cache {self.path}: {exc}; {_REMEDY}")


def _sound(key: str, mode: object, value: object) -> bytes | RecordDamaged:
    if value is None:
        return RecordDamaged(f"{key}: nothing, or larger than {MAX_BYTES} bytes; refused")
    if mode != _RAW or not isinstance(value, bytes):
        return RecordDamaged(f"{key}: refused, because advisor stores only bytes and this is not")
    return value


def _code(exc: sqlite3.Error) -> int | None:
    full: int | None = getattr(exc, "sqlite_errorcode", None)
    return full if full is None else full & 0xFF


class _Gate:
    """One statement at a time in this process, and none while it forks.

    A child of a fork has only the thread that forked: what another one holds then, SQLite's own
    locks included, is held in the child for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._close, after_in_parent=self._open, after_in_child=self._renew
            )

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=time_left(_BUSY_S)):
            raise StoreError("cache: another thread is still reading; try again")

    def __exit__(self, *_exc: object) -> None:
        self._lock.release()

    def _close(self) -> None:
        self._held = self._lock.acquire(timeout=_FORKING_S)

    def _open(self) -> None:
        if self._held:
            self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.RLock()


_GATE = _Gate()


class _Reader:
    """A read-only connection. `planted`: what is in the database, would run and was not made by
    diskcache, or ''."""

    def __init__(self, database: Path) -> None:
        self._until = [0.0]  # in a list that the handler holds: it must not hold the reader
        self._connect(database, "mode=ro")
        try:
            self.planted = self._planted()
        except sqlite3.OperationalError as exc:
            self.close()
            if os.access(database.parent, os.W_OK):
                if _code(exc) != sqlite3.SQLITE_READONLY:
                    raise
                # Its first writer was killed: opening it to write undoes what that left.
                self._connect(database, "mode=rw")
                self.planted = self._planted()
                self._connection.execute("PRAGMA query_only = 1")
                return
            # SQLite keeps its lock files beside the database, which a read-only folder forbids.
            log = database.with_name(f"{_DATABASE}-wal")
            if log.exists() and log.stat().st_size > 0:
                raise StoreError(
                    f"cache {database.parent.parent}: its last writer was cut off and the folder "
                    "is read-only; run `advisor show` once where it can be written"
                ) from None
            self._connect(database, "mode=ro&immutable=1")
            self.planted = self._planted()
        except BaseException:
            self.close()
            raise

    def rows(self, sql: str, values: Sequence[str | int] = ()) -> Rows:
        """What a statement gives, before this thread's deadline."""
        seconds = time_left(_BUSY_S)
        self._until[0] = time.monotonic() + seconds
        self._connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1e3)}")
        return self._connection.execute(sql, values).fetchall()

    def close(self) -> None:
        self._connection.close()

    def _planted(self) -> str:
        listed = self.rows(
            "SELECT type, substr(name, 1, 40), substr(sql, 1, 1000) FROM sqlite_master"
        )
        for kind, name, sql in listed:
            if sql is not None and not _OF_DISKCACHE.fullmatch(" ".join(sql.split())):
                return f"a {kind} {name!r} that advisor did not make"
        columns = self.rows("SELECT hidden FROM pragma_table_xinfo('Cache')")
        return "a computed column" if any(hidden for (hidden,) in columns) else ""

    def _connect(self, database: Path, how: str) -> None:
        self._connection = sqlite3.connect(
            f"{database.as_uri()}?{how}",
            uri=True,
            timeout=0,  # set for each statement
            isolation_level=None,
        )
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
        until = self._until
        self._connection.set_progress_handler(lambda: time.monotonic() > until[0], _STEPS)


_OF_DISKCACHE = re.compile(
    r"CREATE TABLE (Settings|Cache) ?\(.*"
    r"|CREATE (UNIQUE )?INDEX Cache_\w+ ON Cache ?\([a-z_, ]+\)( WHERE [a-z_]+ IS NOT NULL)?"
    r"|CREATE TRIGGER Settings_\w+ (AFTER|BEFORE) (INSERT|UPDATE|DELETE) ON Cache FOR EACH ROW"
    r" BEGIN UPDATE Settings SET value = value( ?[+-] ?(1|NEW\.size|OLD\.size))+"
    r' WHERE key = "(count|size)"; END'
)
"""What it makes in a database, blanks as one."""


@functools.cache
def _bytes_disk() -> type[Any]:
    import diskcache  # here, because reading does without

    class BytesDisk(diskcache.Disk):  # type: ignore[misc]
        """Takes and gives only bytes under text keys; never pickles, never touches a file."""

        def put(self, key: object) -> tuple[str, bool]:
            if type(key) is not str:
                raise RecordDamaged(f"key {key!r}: expected text")
            return key, True

        def get(self, key: object, raw: bool) -> str:
            if not raw or type(key) is not str:
                raise RecordDamaged("a key in the store is no text; refused")
            return key

        def store(self, value: object, read: bool, key: object = None) -> tuple[Any, ...]:
            if read or type(value) is not bytes:
                raise RecordDamaged(f"value of type {type(value).__name__}: expected bytes")
            return 0, _RAW, None, sqlite3.Binary(value)

        def fetch(self, mode: int, filename: object, value: object, read: bool) -> bytes:
            if mode != _RAW or read or type(value) is not bytes:
                raise RecordDamaged("a value in the store is not bytes; refused")
            return value

        def remove(self, file_path: object) -> None:
            """No value is in a file; a row that says otherwise is not obeyed."""

    return BytesDisk
