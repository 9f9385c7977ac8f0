"""Copy records from store to store, into packs and out of packs.

They are copied unmodified: fields of a newer version and each owner's signature stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from advisor.cache.name import Name
from advisor.cache.reader import AT_ONCE
from advisor.cache.record import Record, Wanted, every
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores import BLOBS, ByteStore
from advisor.cache.stores.disk import PackStore, write_pack
from advisor.errors import NoRecord, RecordDamaged, Unauthorized, UsageError


class CopyResult(Struct, frozen=True, kw_only=True):
    """The outcome for one record, or for its artifacts. 'known': the store had the same. `reason`:
    why it was refused."""

    name: str
    outcome: Literal["added", "known", "refused"]
    target: str = ""
    reason: str = ""


def copy_records(
    source: Iterable[tuple[str, bytes | RecordDamaged]],
    records: Records,
    store: ByteStore,
    wanted: Wanted = every,
) -> Iterator[CopyResult]:
    """Copy the sound records of a source into a store, one by one. Yields each record's outcome.
    Raises StoreError if the source or the store fails."""
    there = set(store.keys())
    for text, data in source:
        try:
            record, _name, data = sound(records, text, data)
            if wanted(record):
                # The same name is the same bytes, unless the copy there is damaged.
                known = len(data) if text in there else None
                yield _copied(store, text, data, known, record.target.name)
        except RecordDamaged as exc:  # raised here, or by a server of another version
            yield CopyResult(name=text, outcome="refused", reason=str(exc))


def _copied(store: ByteStore, key: str, data: bytes, there: int | None, target: str) -> CopyResult:
    """Put data into a store, unless the store has the same. `there`: bytes that the store has under
    this key."""
    known = there == len(data) and store.get_many([key], len(data)).get(key) == data
    if not known:
        store.put(key, data)
    name = key.removeprefix(BLOBS)
    return CopyResult(name=name, outcome="known" if known else "added", target=target)


def sound(records: Records, text: str, data: bytes | RecordDamaged) -> tuple[Record, Name, bytes]:
    """The record under a store's key, its name and its bytes. Raises RecordDamaged if the record is
    refused."""
    name = Name.parse(text, records.keyring)
    if name is None:
        raise RecordDamaged(f"{text[:80]!r}: no name of a record")
    record = records.read(name, data)
    assert isinstance(data, bytes)
    return record, name, data


def copy_artifacts(
    records: Records, source: ByteStore, store: ByteStore, places: Collection[str]
) -> Iterator[CopyResult]:
    """Copy the artifacts of some records into another store, if the reader or their team signed
    them; they replace those of the same name. Raises StoreError if one of the stores fails."""
    artifacts = records.artifacts
    if not artifacts.most:
        return
    there = store.sizes()
    for label in artifacts.on(source):
        if not label.trusted or label.record_key not in places:
            continue
        try:
            if (packed := artifacts.checked(source, label)) is not None:
                what = f"{size(len(packed))} of artifacts"
                yield _copied(store, label.text, packed, there.get(label.text), what)
        except (Unauthorized, RecordDamaged) as exc:  # another user's, or too large for the server
            yield CopyResult(name=label.name, outcome="refused", reason=str(exc))


def contents(store: ByteStore) -> Iterator[tuple[str, bytes | RecordDamaged]]:
    names = [text for text in store.keys() if Name.parse(text)]
    for start in range(0, len(names), AT_ONCE):
        yield from store.get_many(names[start : start + AT_ONCE]).items()


def sync(records: Records, wanted: Wanted = every) -> Iterator[CopyResult]:
    """Copy every version in the first of two stores into the second, with its artifacts if you or
    your team signed them. Yields each outcome. Raises StoreError if one of the stores fails."""
    if len(records.stores) != 2:
        raise UsageError("sync: expected one store for each side")
    here, there = records.stores
    if here.url == there.url:
        raise UsageError(f"sync: both stores are {here.url}; name two")
    if not here.keys():
        raise UsageError(f"sync: there is nothing in {here.url}")
    there.check_writable()
    places: set[str] = set()
    for one in copy_records(contents(here), records, there, wanted):
        if one.outcome != "refused" and (name := Name.parse(one.name)):
            places.add(name.record_key)
        yield one
    yield from copy_artifacts(records, here, there, places)


def export(records: Records, path: Path, wanted: Wanted = every) -> int:
    """Write the newest version of each record into a pack. Returns the number of records. Lines on
    failures are in `records.damaged` and `records.unreachable`. Raises StoreError if no store can
    be read or the file cannot be written, NoRecord if nothing fits."""
    chosen = [one for one in records.held() if wanted(one.record)]
    if not chosen:
        why = "; ".join(["", *records.unreachable])
        raise NoRecord(f"export: no record fits; to see what there is, run: advisor show{why}")
    several = sorted({text: one.store for one in chosen for text in one.texts}.items())
    pairs = ((text, data) for text, store in several if (data := store.get(text)) is not None)
    write_pack(path, iter(lambda: [*itertools.islice(pairs, AT_ONCE)], []))
    return len({one.name.record_key for one in chosen})


def unpack(
    path: Path, records: Records, wanted: Wanted = every
) -> tuple[ByteStore, Iterator[CopyResult]]:
    """Copy a pack's records into the first store that can be written. Returns this store, and each
    record's outcome. Raises UsageError if there is no such file, StoreError if it is no pack."""
    if not path.is_file():
        raise UsageError(f"import {str(path)!r}: there is no such file")
    store = records.first_writable()
    return store, copy_records(contents(PackStore(path)), records, store, wanted)
