"""The default store: SQLite through diskcache, holding bytes under text keys and nothing else.

diskcache writes; a read-only connection of our own reads, because opening a diskcache writes, is
slow, fails in a read-only folder, and unpickles whatever a row says is a pickle (CVE-2025-69872).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.cache.stores import one_by_one
from advisor.cache.stores.filesystem import make_folder
from advisor.errors import RecordDamaged, StoreDamaged, StoreError

if TYPE_CHECKING:
    from advisor.cache.stores import Store

_DATABASE = "cache.db"  # diskcache's name
_RAW = 1  # diskcache's number for a value that stands in the row as it is
_BUSY_S = 20.0
_WRITING_S = 60.0
"""What is put took minutes to measure: it waits longer for other writers than a reader does."""
_REMEDY = "point --cache or ADVISOR_CACHE to another folder"

_CORRUPT = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # a table or column of another program's database
    sqlite3.SQLITE_MISMATCH,
    None,  # raised by Python: a text that is no UTF-8
}


class DiskStore:
    """A folder: records/ is the database, studies/ is for the studies beside it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self._records = self.path / "records"
        self._local = threading.local()

    @property
    def url(self) -> str:
        return f"disk:{self.path}"

    @property
    def studies(self) -> Path:
        return self.path / "studies"

    def keys(self) -> list[str]:
        sql = "SELECT key FROM Cache WHERE raw = 1 AND typeof(key) = 'text' ORDER BY key"
        return [key for (key,) in self._select(sql)]

    def get(self, key: str) -> bytes | None:
        rows = self._select("SELECT mode, value FROM Cache WHERE key = ? AND raw = 1", key)
        if not rows:
            return None
        ((mode, value),) = rows
        if mode != _RAW or type(value) is not bytes:
            raise RecordDamaged(
                f"{key}: refused, because advisor stores only bytes and this is not"
            )
        return value

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        return one_by_one(self.get, keys)

    def put(self, key: str, data: bytes) -> None:
        with self._writing() as cache:
            cache.set(key, data)

    def delete(self, key: str) -> bool:
        if not self._select("SELECT 1 FROM Cache WHERE key = ? AND raw = 1", key):
            return False
        with self._writing() as cache:
            return bool(cache.delete(key))

    def check_writable(self) -> None:
        problem = self._problem()
        if problem:
            raise self._damaged(problem)
        try:
            if (self._records / _DATABASE).exists():
                with self._writing():
                    return
            # Nothing is made yet: a command that is refused later leaves nothing behind.
            there = next(p for p in (self._records, *self._records.parents) if p.exists())
        except OSError as exc:
            raise self._mapped(exc) from exc
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written" if there.is_dir() else "is not a folder"
            raise StoreError(f"cache {self.path}: {there} {why}; {_REMEDY}")

    def health(self) -> str:
        try:
            problem = self._problem()
            if problem:
                return f"damaged: {problem}"
            sql = "SELECT count(*) FROM Cache WHERE raw != 1 OR mode != 1 OR typeof(key) != 'text'"
            foreign = sum(count for (count,) in self._select(sql))
            if foreign:
                return f"damaged: {foreign} rows that advisor did not write; they are ignored"
            if not self.keys():
                return "empty"
        except StoreDamaged as exc:
            return f"damaged: {exc.__cause__ or exc}"
        except StoreError as exc:
            return f"unusable: {exc}"
        writable = all(os.access(p, os.W_OK) for p in (self._records, self._records / _DATABASE))
        return "ok" if writable else "ok, read-only"

    def set_aside(self) -> Path:
        self._local = threading.local()
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

    def _problem(self) -> str:
        """What is wrong with the database, or ''."""
        rows = self._select("PRAGMA quick_check(1)")
        return str(rows[0][0]).splitlines()[-1] if rows and rows[0][0] != "ok" else ""

    def _select(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            reader = self._reader()
            return reader.connection.execute(sql, values).fetchall() if reader else []
        except sqlite3.OperationalError as exc:
            if str(exc).startswith("no such table"):
                return []  # another process is just creating it
            raise self._mapped(exc) from exc
        except (sqlite3.Error, OSError) as exc:
            raise self._mapped(exc) from exc

    def _reader(self) -> _Reader | None:
        """This thread's connection to the database that is there now; None where none is."""
        database = self._records / _DATABASE
        try:
            status = database.stat()
        except FileNotFoundError:
            self._local.reader = None
            return None
        identity = (os.getpid(), status.st_dev, status.st_ino)
        reader: _Reader | None = getattr(self._local, "reader", None)
        if reader is None or reader.identity != identity or reader.frozen:
            reader = self._local.reader = _Reader(database, identity)
        return reader

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Any]:
        import diskcache

        cache = None
        try:
            make_folder(self._records)
            cache = diskcache.Cache(
                str(self._records),
                timeout=_WRITING_S,
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
            return StoreError(f"cache {self.path}: {exc.strerror or exc}; {_REMEDY}")
        full: int | None = getattr(exc, "sqlite_errorcode", None)
        code = full if full is None else full & 0xFF
        if code in _CORRUPT:
            return self._damaged(str(exc))
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreError(f"cache {self.path}: locked by another process; try again")
        return StoreError(f"cache {self.path}: {exc}; {_REMEDY}")


class _Reader:
    """A read-only connection. `frozen`: it sees the file as it was when opened."""

    def __init__(self, database: Path, identity: tuple[int, int, int]) -> None:
        self.identity = identity
        self.frozen = False
        self.connection = self._connect(database, "mode=ro")
        try:
            self.connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        except sqlite3.OperationalError:
            # SQLite keeps its lock files beside the database, which a read-only folder forbids.
            log = database.with_name(f"{_DATABASE}-wal")
            if os.access(database.parent, os.W_OK):
                raise
            if log.exists() and log.stat().st_size > 0:
                raise StoreError(
                    f"cache {database.parent.parent}: its last writer was cut off and the folder "
                    "is read-only; run `advisor show` once where it can be written"
                ) from None
            self.connection.close()
            self.connection = self._connect(database, "mode=ro&immutable=1")
            self.frozen = True

    @staticmethod
    def _connect(database: Path, how: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{database.as_uri()}?{how}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,  # used by one thread, but closed by whichever drops it
        )

    def __del__(self) -> None:
        connection = getattr(self, "connection", None)
        if connection is None:
            return
        if self.identity[0] == os.getpid():
            connection.close()
        else:
            _INHERITED.append(connection)


_INHERITED: list[sqlite3.Connection] = []
"""Connections of a parent process: SQLite forbids to use or close them after a fork."""


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


def _proof(store: DiskStore) -> Store:
    return store
