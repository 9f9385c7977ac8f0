"""Packs: many records in one file, to carry elsewhere; as a store, a pack is read-only.

A pack is a zip file with one member for each record, and a header. Each record has its own
checksum, and its own signature if it was signed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from advisor.cache.stores.filesystem import open_regular, place
from advisor.cache.stores.store import MAX_BYTES, Store
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import RecordDamaged, StoreDamaged, StoreError

FORMAT = 2
HEADER = "advisor-pack.json"
MAX_RECORDS = 2**16 - 2
"""More need an extension of the zip format, which is not accepted."""
_MOST_LISTING = 400 * MAX_RECORDS
"""Bytes of the list of members."""
_END = struct.Struct("<4s4H2LH")
_MORE = b"PK\x06\x07"
_FAULTS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
)
"""What zipfile raises for a damaged file, or one that is no zip file."""


class PackStore(Store):
    """pack:FILE."""

    takes_blobs = False

    def __init__(self, path: str | Path) -> None:
        self.path = place(path)
        self.url = f"pack:{self.path}"
        self._stamp: tuple[int, int] | None = None
        self._names: list[str] = []

    def keys(self) -> list[str]:
        try:
            status = self.path.stat()
        except OSError as exc:
            raise self._mapped(exc) from exc
        stamp = status.st_mtime_ns, status.st_size
        if stamp != self._stamp:
            with self._opened() as pack:
                self._names = sorted(set(pack.namelist()) - {HEADER})
            self._stamp = stamp
        return list(self._names)

    def get(self, key: str, most: int = MAX_BYTES) -> bytes | None:
        found = self.get_many([key]).get(key)
        if isinstance(found, RecordDamaged):
            raise found
        return found

    def get_many(self, keys: Iterable[str]) -> dict[str, bytes | RecordDamaged]:
        there = {*keys} & {*self.keys()}
        if not there:
            return {}
        with self._opened() as pack:
            return {key: _sound(pack, pack.getinfo(key)) for key in sorted(there)}

    def put(self, key: str, data: bytes) -> None:
        raise StoreError(f"cache {self.url}: a pack is read-only; `advisor export` writes one")

    def delete(self, key: str) -> bool:
        if key in self.keys():
            self.check_writable()
        return False

    def check_writable(self) -> None:
        self.put("", b"")

    def is_read_only(self) -> bool:
        return True

    @contextlib.contextmanager
    def _opened(self) -> Iterator[_Pack]:
        try:
            with contextlib.closing(_open(self.path)) as pack:
                yield pack
        except OSError as exc:
            raise self._mapped(exc) from exc

    def _mapped(self, exc: OSError) -> StoreError:
        return StoreError(f"cache {self.url}: {exc.strerror or exc}")


class _Pack(zipfile.ZipFile):
    """A zip file that closes the file object that it was given."""

    def close(self) -> None:
        file = self.fp
        super().close()
        if file is not None:
            file.close()


def read(path: Path) -> Iterator[tuple[str, bytes | RecordDamaged]]:
    """The name and the encoded bytes of each record in a pack, or what is wrong with them.

    Raises:
        StoreDamaged: it is no pack, or was cut off. OSError.
    """
    with contextlib.closing(_open(path)) as pack:
        for info in pack.infolist():
            if info.filename != HEADER:
                yield info.filename, _sound(pack, info)


def _open(path: Path) -> _Pack:
    file = open_regular(path)
    try:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 20 - _END.size))
        tail = file.read()
        if len(tail) < _END.size or tail[-_END.size :][:2] != b"PK":
            raise StoreDamaged(f"{path}: no pack of advisor's, or cut off; export it again", path)
        _kind, _disk, _first, here, count, listing, _start, comment = _END.unpack(
            tail[-_END.size :]
        )
        many = max(here, count) > MAX_RECORDS + 1 or listing > _MOST_LISTING
        if many or comment or tail.startswith(_MORE):
            raise StoreDamaged(f"{path}: no pack of advisor's: too many members", path)
        pack = _Pack(file)
        header = json.loads(_member(pack, pack.getinfo(HEADER)))
        number = header.get("advisor pack") if isinstance(header, dict) else None
        if type(number) is not int:
            raise StoreDamaged(f"{path}: no pack of advisor's", path)
        if number != FORMAT:
            raise StoreDamaged(f"{path}: pack format {number}; this version reads {FORMAT}", path)
        return pack
    except (*_FAULTS, KeyError, RecordDamaged) as exc:
        file.close()
        reason = (str(exc).splitlines() or [""])[0][:80] or type(exc).__name__
        raise StoreDamaged(f"{path}: no pack of advisor's, or damaged ({reason})", path) from exc
    except BaseException:
        file.close()
        raise


def _sound(pack: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes | RecordDamaged:
    check_deadline()
    try:
        return _member(pack, info)
    except RecordDamaged as exc:
        return exc


def _member(pack: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """The content of a member, of at most MAX_BYTES.

    Raises:
        RecordDamaged: it is larger or damaged.
    """
    name = info.filename[:80]
    if info.file_size > MAX_BYTES or info.compress_size > MAX_BYTES:
        raise RecordDamaged(f"{name}: larger than {MAX_BYTES} bytes; refused")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise RecordDamaged(f"{name}: packed in a way that advisor does not; refused")
    try:
        with pack.open(info) as member:
            data = member.read(MAX_BYTES + 1)
    except (*_FAULTS, OSError) as exc:
        raise RecordDamaged(f"{name}: damaged ({str(exc)[:80] or type(exc).__name__})") from exc
    if len(data) > MAX_BYTES:
        raise RecordDamaged(f"{name}: larger than {MAX_BYTES} bytes; refused")
    return data


def write(path: Path, records: Iterable[tuple[str, bytes]]) -> int:
    """Write a pack atomically; how many records are in it.

    Raises:
        StoreError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    count = 0
    try:
        try:
            with temporary.open("xb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, allowZip64=False) as pack:
                    pack.writestr(HEADER, json.dumps({"advisor pack": FORMAT}))
                    for name, data in records:
                        pack.writestr(name, data)
                        count += 1
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise StoreError(f"pack {path}: {exc.strerror or exc}") from exc
    except zipfile.LargeZipFile as exc:
        raise StoreError(
            f"pack {path}: more than {MAX_RECORDS} records or 2 GiB; narrow it"
        ) from exc
    return count
