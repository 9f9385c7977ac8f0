"""A folder with one file per record, for network file systems, images and repositories."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from advisor.cache.stores import filesystem
from advisor.cache.stores.store import BLOBS, MAX_BYTES, ByKey, ByteStore, blob_key, is_blob
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import RecordDamaged, StoreError, reason

SUFFIX = ".msgpack"
_RECORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./]{0,200}")


def file_of(key: str) -> str:
    """The path of a key's file below the store's folder. Raises RecordDamaged if it could lie
    outside that folder, or be hidden in it."""
    if is_blob(key):
        return key
    if not _RECORD.fullmatch(key) or ".." in key:
        raise RecordDamaged(f"key {key!r}: not a record's key; refused")
    return key.replace("/", "-") + SUFFIX


def keys_of(files: Iterable[str]) -> list[str]:
    """The sorted keys of the records among these files of a store's folder."""
    return sorted(
        name.removesuffix(SUFFIX).replace("-", "/")
        for name in files
        if name.endswith(SUFFIX) and not name.startswith(".")
    )


class DirStore(ByteStore):
    """dir:FOLDER. Records lie in the folder itself, blobs in its folder artifacts/."""

    _faults: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, path: str | Path) -> None:
        self.path = filesystem.absolute_path(path)
        self.url = f"dir:{self.path}"
        self.studies = self.path / "studies"

    def keys(self) -> list[str]:
        return keys_of(entry.name for entry in self._listed(self.path))

    def sizes(self, prefix: str = BLOBS) -> dict[str, int]:
        with self._errors():
            return {
                key: one.stat().st_size
                for one in self._listed(self.path / BLOBS)
                if (key := blob_key(one.name, prefix)) and one.is_file()
            }

    def get_many(self, keys: Iterable[str], most: int = MAX_BYTES) -> ByKey:
        found: ByKey = {}
        for key in keys:
            check_deadline()
            try:
                found[key] = filesystem.read_regular(self.path / file_of(key), most)
            except RecordDamaged as exc:
                found[key] = exc
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE: just removed, on NFS
                    continue
                if is_blob(key) and exc.errno != errno.EFBIG:
                    raise self._mapped(exc) from exc
                found[key] = RecordDamaged(f"{key}: {exc.strerror}; refused")
        return found

    def put(self, key: str, data: bytes) -> None:
        with self._errors():
            filesystem.write_whole(self.path / file_of(key), data)

    def delete(self, key: str) -> bool:
        with self._errors(), contextlib.suppress(FileNotFoundError):
            (self.path / file_of(key)).unlink()
            return True
        return False

    def check_writable(self) -> None:
        filesystem.check_folder(self.path, self.path)

    def _listed(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        with self._errors(), contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if not number % 1024:
                    check_deadline()
                yield entry

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._faults as exc:
            raise self._mapped(exc) from exc

    def _mapped(self, exc: Exception) -> StoreError:
        """The error to raise for a fault of the file system."""
        return StoreError(f"cache {self.path}: {reason(exc)}; {filesystem.REMEDY}")
