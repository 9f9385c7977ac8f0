"""A folder with one msgpack file per record: no locks, no database, readable where it lies.

What a store on a network file system needs, and what ships inside an image or a repository.
"""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.cache.codec import MAX_BYTES
from advisor.cache.name import file_of, keys_of
from advisor.cache.stores import one_by_one
from advisor.cache.stores.filesystem import (
    abandoned,
    existing,
    place,
    read_regular,
    write_whole,
)
from advisor.cache.stores.patience import go_on
from advisor.cache.stores.shelf import ARTIFACTS, FolderShelf
from advisor.errors import RecordDamaged, StoreError

if TYPE_CHECKING:
    from advisor.cache.stores import Shelf, Store

_SETTLED_S = 2.0
"""Age from which a folder's time tells its next change apart: FAT counts in 2 s, others finer."""
_REMEDY = "point --cache or ADVISOR_CACHE to another folder"


class DirStore:
    """The files lie directly in the folder; studies/ is for the studies beside them."""

    def __init__(self, path: str | Path) -> None:
        self.path = place(path)

    @property
    def url(self) -> str:
        return f"dir:{self.path}"

    @property
    def studies(self) -> Path:
        return self.path / "studies"

    @property
    def shelf(self) -> Shelf:
        return FolderShelf(self.path / ARTIFACTS)

    def keys(self) -> list[str]:
        try:
            now = self.path.stat()
            changed = now.st_ino, now.st_mtime_ns, now.st_ctime_ns
            settled = max(now.st_mtime, now.st_ctime) < time.time() - _SETTLED_S
            list_it = _listed if settled else _listed.__wrapped__
            return list(list_it(self.path, changed))
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise self._mapped(exc) from exc

    def get(self, key: str) -> bytes | None:
        try:
            return read_regular(self._file(key), MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno == errno.ESTALE:  # removed on another NFS client while it was read
                return None
            raise RecordDamaged(f"{key}: {exc.strerror}; refused") from exc

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        return one_by_one(self.get, keys)

    def put(self, key: str, data: bytes) -> None:
        try:
            write_whole(self._file(key), data)
        except OSError as exc:
            raise self._mapped(exc) from exc

    def delete(self, key: str) -> bool:
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise StoreError(f"cache {self.path}: {self._file(key).name}: {exc.strerror}") from exc
        return True

    def leavings(self) -> list[Path]:
        """What writers that were killed left behind."""
        try:
            return abandoned(self.path)
        except OSError as exc:
            raise self._mapped(exc) from exc

    def check_writable(self) -> None:
        there = existing(self.path)
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written" if there.is_dir() else "is not a folder"
            raise StoreError(f"cache {self.path}: {there} {why}; {_REMEDY}")

    def health(self) -> str:
        try:
            keys = self.keys()
        except StoreError as exc:
            return f"unusable: {exc}"
        if not keys:
            return "empty"
        return "ok" if os.access(self.path, os.W_OK) else "ok, read-only"

    def set_aside(self) -> Path:
        raise StoreError(f"cache {self.path}: each record is a file of its own; remove what is bad")

    def _file(self, key: str) -> Path:
        return self.path / file_of(key)

    def _mapped(self, exc: OSError) -> StoreError:
        return StoreError(f"cache {self.path}: {exc.strerror or exc}; {_REMEDY}")


@functools.lru_cache(maxsize=4)
def _listed(folder: Path, _changed: tuple[int, ...]) -> tuple[str, ...]:
    """The keys in a folder that last changed then: thousands of files are not listed twice."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if not len(names) % 1024:
                go_on()
    return tuple(keys_of(names))


def _proof(store: DirStore) -> Store:
    return store
