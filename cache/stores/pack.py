"""Packs: many records in one file, to carry elsewhere; as a store, a pack is read-only.

A pack is a zip file with one member for each record, and a header. Each record has its own
checksum, and its own signature if it was signed.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from advisor.cache.stores.filesystem import open_regular, place, whole_file
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
    KeyError,
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

    def keys(self) -> list[str]:
        with self._opened() as pack:
            return sorted({*pack.namelist()} - {HEADER})

    def get_many(
        self, keys: Iterable[str], most: int = MAX_BYTES
    ) -> dict[str, bytes | RecordDamaged]:
        with self._opened() as pack:
            there = {*keys} & {*pack.namelist()} - {HEADER}
            return {key: _member(pack, pack.getinfo(key)) for key in sorted(there)}

    def members(self) -> Iterator[tuple[str, bytes | RecordDamaged]]:
        """The name and the data of each record, or what is wrong with it."""
        with self._opened() as pack:
            for info in pack.infolist():
                if info.filename != HEADER:
                    yield info.filename, _member(pack, info)

    def put(self, key: str, data: bytes) -> None:
        raise StoreError(f"cache {self.url}: a pack is read-only; `advisor export` writes one")

    def delete(self, key: str) -> bool:
        if key in self.keys():
            self.check_writable()
        return False

    def check_writable(self) -> None:
        self.put("", b"")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        """Raises StoreDamaged if it is no pack, or was cut off."""
        try:
            with open_regular(self.path) as file:
                _check_end(file)
                with zipfile.ZipFile(file) as pack:
                    header = _member(pack, pack.getinfo(HEADER))
                    made = json.loads(header) if isinstance(header, bytes) else header
                    number = made.get("advisor pack") if isinstance(made, dict) else None
                    if number != FORMAT or type(number) is not int:
                        raise ValueError(f"format {number}; this version reads {FORMAT}")
                    yield pack
        except OSError as exc:
            raise StoreError(f"cache {self.url}: {exc.strerror or exc}") from exc
        except _FAULTS as exc:
            reason = (str(exc).splitlines() or [""])[0][:80] or type(exc).__name__
            raise StoreDamaged(
                f"{self.path}: no pack of advisor's, or damaged ({reason}); export it again",
                self.path,
            ) from exc


def _check_end(file: BinaryIO) -> None:
    """Raise ValueError if the end of a zip file announces more members than a pack has: zipfile
    would read all of them into memory."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - 20 - _END.size))
    tail = file.read()
    if len(tail) < _END.size or tail[-_END.size :][:2] != b"PK":
        raise ValueError("cut off")
    _kind, _disk, _first, here, count, listing, _start, comment = _END.unpack(tail[-_END.size :])
    if max(here, count) > MAX_RECORDS + 1 or listing > _MOST_LISTING or comment:
        raise ValueError("too many members")
    if tail.startswith(_MORE):
        raise ValueError("too many members")


def _member(pack: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes | RecordDamaged:
    """The content of a member, or what is wrong with it."""
    check_deadline()
    name = info.filename[:80]
    if max(info.file_size, info.compress_size) > MAX_BYTES:
        return RecordDamaged(f"{name}: larger than {MAX_BYTES} bytes; refused")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return RecordDamaged(f"{name}: packed in a way that advisor does not; refused")
    try:
        with pack.open(info) as member:
            data = member.read(MAX_BYTES + 1)
    except (*_FAULTS, OSError) as exc:
        return RecordDamaged(f"{name}: damaged ({str(exc)[:80] or type(exc).__name__})")
    if len(data) > MAX_BYTES:
        return RecordDamaged(f"{name}: larger than {MAX_BYTES} bytes; refused")
    return data


def write(path: Path, records: Iterable[tuple[str, bytes]]) -> None:
    """Write a pack atomically.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        with (
            whole_file(path) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, allowZip64=False) as pack,
        ):
            pack.writestr(HEADER, json.dumps({"advisor pack": FORMAT}))
            for name, data in records:
                pack.writestr(name, data)
    except OSError as exc:
        raise StoreError(f"pack {path}: {exc.strerror or exc}") from exc
    except zipfile.LargeZipFile as exc:
        raise StoreError(
            f"pack {path}: more than {MAX_RECORDS} records or 2 GiB; "
            "choose fewer with --target, --device or --key"
        ) from exc
