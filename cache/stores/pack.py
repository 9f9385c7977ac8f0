"""Packs: many records in one file, to be carried elsewhere; as a store, read-only.

A msgpack stream: a header, then a name and an encoded record, again and again, then a trailer with
their number. Each record carries its own checksum, and its own signature where it was signed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from advisor.cache.codec import MAX_BYTES
from advisor.cache.stores import one_by_one
from advisor.cache.stores.filesystem import open_regular
from advisor.errors import RecordDamaged, StoreDamaged, StoreError

if TYPE_CHECKING:
    from advisor.cache.stores import Store

FORMAT = 1
MAX_RECORDS = 100_000
_LIMITS = {
    "max_bin_len": MAX_BYTES,
    "max_str_len": 200,
    "max_array_len": 2,
    "max_map_len": 8,
    "max_ext_len": 0,
    "max_buffer_size": 2 * MAX_BYTES,
}


class PackStore:
    """pack:FILE."""

    studies: Path | None = None

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self._stamp: tuple[int, int] | None = None
        self._places: dict[str, tuple[int, int]] = {}

    @property
    def url(self) -> str:
        return f"pack:{self.path}"

    def keys(self) -> list[str]:
        return sorted(self._index())

    def get(self, key: str) -> bytes | None:
        place = self._index().get(key)
        if place is None:
            return None
        try:
            with open_regular(self.path) as file:
                file.seek(place[0])
                return bytes(msgpack.unpackb(file.read(place[1]), max_bin_len=MAX_BYTES))
        except OSError as exc:
            raise StoreError(f"cache {self.url}: {exc.strerror or exc}") from exc

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        return one_by_one(self.get, keys)

    def put(self, key: str, data: bytes) -> None:
        raise StoreError(f"cache {self.url}: a pack is read-only; `advisor export` writes one")

    def delete(self, key: str) -> bool:
        if key not in self._index():
            return False
        raise StoreError(f"cache {self.url}: a pack is read-only; `advisor export` writes one")

    def check_writable(self) -> None:
        self.put("", b"")

    def health(self) -> str:
        try:
            return "ok, read-only" if self._index() else "empty"
        except StoreDamaged as exc:
            return f"damaged: {exc}"
        except StoreError as exc:
            return f"unusable: {exc}"

    def set_aside(self) -> Path:
        raise StoreError(f"cache {self.url}: a pack is read-only")

    def _index(self) -> dict[str, tuple[int, int]]:
        try:
            status = self.path.stat()
            stamp = status.st_mtime_ns, status.st_size
            if stamp != self._stamp:
                self._places = {name: place for name, place, _data in read(self.path)}
                self._stamp = stamp
        except OSError as exc:
            raise StoreError(f"cache {self.url}: {exc.strerror or exc}") from exc
        return self._places


def read(path: Path) -> Iterator[tuple[str, tuple[int, int], bytes]]:
    """Each record of a pack: its name, where in the file its bytes are, and these, not decoded.

    Raises:
        StoreDamaged: it is no pack, or was cut; what came before stands. OSError.
    """
    with open_regular(path) as file:
        stream = msgpack.Unpacker(file, raw=False, strict_map_key=True, **_LIMITS)
        header = _next(stream, path)
        if not isinstance(header, dict) or type(header.get("advisor pack")) is not int:
            raise StoreDamaged(f"{path}: no pack of advisor's", path)
        if header["advisor pack"] > FORMAT:
            raise StoreDamaged(f"{path}: a newer kind of pack; upgrade advisor", path)
        count = 0
        while True:
            name = _next(stream, path)
            if isinstance(name, dict):
                if name.get("records") != count:
                    raise StoreDamaged(f"{path}: records are missing from it", path)
                return
            began = stream.tell()
            data = _next(stream, path)
            if type(name) is not str or type(data) is not bytes or count >= MAX_RECORDS:
                raise StoreDamaged(f"{path}: damaged after {count} records", path)
            count += 1
            yield name, (began, stream.tell() - began), data


def _next(stream: Any, path: Path) -> Any:
    try:
        return stream.unpack()
    except msgpack.OutOfData as exc:
        raise StoreDamaged(f"{path}: cut off; export it again", path) from exc
    except OSError:
        raise
    except Exception as exc:  # msgpack raises more kinds than it documents
        reason = str(exc).splitlines()[0][:80] if str(exc) else type(exc).__name__
        raise StoreDamaged(f"{path}: damaged ({reason})", path) from exc


def write(path: Path, records: Iterable[tuple[str, bytes]]) -> int:
    """Write a pack, whole or not at all; how many records are in it.

    Raises:
        StoreError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    count = 0
    try:
        try:
            with temporary.open("xb") as file:
                file.write(msgpack.packb({"advisor pack": FORMAT}))
                for name, data in records:
                    file.write(msgpack.packb(name) + msgpack.packb(data))
                    count += 1
                file.write(msgpack.packb({"records": count}))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise StoreError(f"pack {path}: {exc.strerror or exc}") from exc
    return count


def _proof(store: PackStore) -> Store:
    return store
