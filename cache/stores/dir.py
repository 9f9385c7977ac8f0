"""A folder with one file per record: no locks, no database, readable where it lies.

For network file systems, container images and repositories.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from advisor.cache.stores.filesystem import (
    abandoned,
    check_folder,
    place,
    read_regular,
    write_whole,
)
from advisor.cache.stores.store import BLOBS, MAX_BYTES, Store, blob_key, is_blob
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import RecordDamaged, StoreError

SUFFIX = ".msgpack"
_RECORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./]{0,200}")
_SETTLED_S = 2.0
"""A folder whose time stamp is older has not changed since it was listed. FAT counts in 2 s."""


def file_of(key: str) -> str:
    """The path of a key's file below the store's folder.

    Raises:
        RecordDamaged: it could lie outside the folder, or be hidden in it.
    """
    if is_blob(key):
        return key
    if not _RECORD.fullmatch(key) or ".." in key:
        raise RecordDamaged(f"key {key!r}: no name of a record")
    return key.replace("/", "-") + SUFFIX


def keys_of(files: Iterable[str]) -> list[str]:
    """The sorted keys of the records among these files of a store's folder."""
    return sorted(
        name.removesuffix(SUFFIX).replace("-", "/")
        for name in files
        if name.endswith(SUFFIX) and not name.startswith(".")
    )


class DirStore(Store):
    """dir:FOLDER. Records lie in the folder itself, blobs in its folder artifacts/."""

    def __init__(self, path: str | Path) -> None:
        self.path = place(path)
        self.url = f"dir:{self.path}"
        self.studies = self.path / "studies"

    def keys(self) -> list[str]:
        with self._errors():
            try:
                now = self.path.stat()
                changed = now.st_ino, now.st_mtime_ns, now.st_ctime_ns
                settled = max(now.st_mtime, now.st_ctime) < time.time() - _SETTLED_S
                list_it = _listed if settled else _listed.__wrapped__
                return list(list_it(self.path, changed))
            except FileNotFoundError:
                return []

    def sizes(self, start: str = BLOBS) -> dict[str, int]:
        with self._errors():
            try:
                with os.scandir(self.path / BLOBS) as entries:
                    return {
                        key: one.stat().st_size
                        for one in entries
                        if (key := blob_key(one.name, start)) and one.is_file()
                    }
            except FileNotFoundError:
                return {}

    def get(self, key: str, most: int = MAX_BYTES) -> bytes | None:
        try:
            return read_regular(self.path / file_of(key), most)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno == errno.ESTALE:  # another NFS client removed it meanwhile
                return None
            if is_blob(key) and exc.errno != errno.EFBIG:
                raise self.error(exc) from exc
            raise RecordDamaged(f"{key}: {exc.strerror}; refused") from exc

    def put(self, key: str, data: bytes) -> None:
        with self._errors():
            write_whole(self.path / file_of(key), data)

    def delete(self, key: str) -> bool:
        with self._errors():
            try:
                (self.path / file_of(key)).unlink()
            except FileNotFoundError:
                return False
            return True

    def leftovers(self) -> list[Path]:
        with self._errors():
            return [*abandoned(self.path), *abandoned(self.path / BLOBS)]

    def check_writable(self) -> None:
        check_folder(self.path, self.path)

    def is_read_only(self) -> bool:
        return not os.access(self.path, os.W_OK)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise self.error(exc) from exc

    def error(self, exc: OSError) -> StoreError:
        """What a fault of the file system is raised as."""
        why = exc.strerror or str(exc)
        return StoreError(
            f"cache {self.path}: {why}; point --cache or ADVISOR_CACHE to another folder"
        )


@functools.lru_cache(maxsize=4)
def _listed(folder: Path, _changed: tuple[int, ...]) -> tuple[str, ...]:
    """The keys in a folder that last changed then: thousands of files are not listed twice."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if not len(names) % 1024:
                check_deadline()
    return tuple(keys_of(names))
