"""Copy records from store to store, into packs and out of packs.

Encoded records are copied unmodified, so that fields of a newer version are not lost, and each
signature stays its owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from advisor.cache.name import Name
from advisor.cache.reader import AT_ONCE
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores import ByteStore
from advisor.cache.stores.disk import PackStore, write_pack
from advisor.errors import NoRecord, RecordDamaged, Unauthorized, UsageError

Wanted = Callable[[Record], bool]


def every(_record: Record) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
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
            record, name, data = sound(records, text, data)
            if not wanted(record):
                continue
            # The same name is the same bytes, unless the copy there is damaged.
            known = name.text in there and store.get_many([name.text]).get(name.text) == data
            if not known:
                store.put(name.text, data)
        except RecordDamaged as exc:  # raised here, or by a server of another version
            yield CopyResult(name=text, outcome="refused", reason=str(exc))
        else:
            yield CopyResult(
                name=name.text, outcome="known" if known else "added", target=record.target.name
            )


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
            packed = artifacts.checked(source, label)
            if packed is None:
                continue
            same_size = there.get(label.text) == len(packed)
            known = same_size and store.get(label.text, len(packed)) == packed
            if not known:
                store.put(label.text, packed)
        except (Unauthorized, RecordDamaged) as exc:  # another user's, or too large for the server
            yield CopyResult(name=label.name, outcome="refused", reason=str(exc))
        else:
            what = f"{size(len(packed))} of artifacts"
            yield CopyResult(name=label.name, outcome="known" if known else "added", target=what)


def contents(store: ByteStore) -> Iterator[tuple[str, bytes | RecordDamaged]]:
    names = [text for text in store.keys() if Name.parse(text)]
    for start in range(0, len(names), AT_ONCE):
        yield from store.get_many(names[start : start + AT_ONCE]).items()


def sync(records: Records, wanted: Wanted = every) -> Iterator[CopyResult]:
    """Copy every version in the first of two stores into the second, with its artifacts if you or
    your team signed them. Yields each outcome. The second store loses no record, so stores may be
    synced in any order. Raises StoreError if one of the two stores fails."""
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
    failures are in `records.damaged` and `records.unreachable`.

    Raises:
        StoreError: no store can be read, or the file cannot be written. NoRecord: nothing fits.
    """
    chosen = [one for one in records.held() if wanted(one.record)]
    if not chosen:
        why = "; ".join(["", *records.unreachable])
        raise NoRecord(f"export: no record fits; to see what there is, run: advisor show{why}")
    write_pack(path, _parts({text: one.store for one in chosen for text in one.texts}))
    return len({one.name.record_key for one in chosen})


def _parts(stores: Mapping[str, ByteStore]) -> Iterator[list[tuple[str, bytes]]]:
    """Yields the data of keys, AT_ONCE keys at a time, each from its own store."""
    texts = sorted(stores)
    for start in range(0, len(texts), AT_ONCE):
        found = ((text, stores[text].get(text)) for text in texts[start : start + AT_ONCE])
        yield [(text, data) for text, data in found if data is not None]


def unpack(
    path: Path, records: Records, wanted: Wanted = every
) -> tuple[ByteStore, Iterator[CopyResult]]:
    """Copy a pack's records into the first store that can be written. Returns this store, and each
    record's outcome.

    Raises:
        UsageError: there is no such file. StoreError: it is no pack, or no store can be written.
    """
    if not path.is_file():
        raise UsageError(f"import {str(path)!r}: there is no such file")
    store = records.first_writable()
    return store, copy_records(contents(PackStore(path)), records, store, wanted)
