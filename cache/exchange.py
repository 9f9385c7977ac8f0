"""Copy records from store to store, into packs and out of them.

Encoded records are copied unmodified, so that nothing a newer version wrote into them is lost, and
each signature stays its owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from advisor.cache.name import Name, ranked
from advisor.cache.reader import AT_ONCE, Reader
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores import Store
from advisor.cache.stores.pack import PackStore, write
from advisor.errors import NoRecord, RecordDamaged, Unauthorized, UsageError

Outcome = Literal["added", "updated", "older", "known", "refused"]
Source = Iterable[tuple[str, bytes | RecordDamaged]]
Wanted = Callable[[Record], bool]


def every(_record: Record) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What became of one record: 'added' has a new key, 'updated' counts from now on, 'older' is
    kept beside one that counts more, 'known' was there. `reason`: why it was refused."""

    name: str
    outcome: Outcome
    target: str = ""
    reason: str = ""


def carry(
    source: Source, records: Records, store: Store, wanted: Wanted = every
) -> Iterator[Carried]:
    """Copy the sound records of a source into a store, one by one, and say what became of each.
    Raises StoreError if one of the two fails."""
    there: dict[str, list[Name]] = {}
    for name in records.names(store):
        there.setdefault(name.record_key, []).append(name)
    for text, data in source:
        try:
            record, name, data = sound(records, text, data)
            if not wanted(record):
                continue
            outcome = _put(store, name, data, there.setdefault(name.record_key, []))
        except RecordDamaged as exc:  # also as a server of another version says
            yield Carried(name=text, outcome="refused", reason=str(exc))
        else:
            yield Carried(name=name.text, outcome=outcome, target=record.target.name)


def _put(store: Store, name: Name, data: bytes, known: list[Name]) -> Outcome:
    """Put a version into a store, and its name among those that are known there."""
    same = any(one.text == name.text for one in known)
    # The same name is the same bytes, unless the copy there is damaged.
    if same and store.get_many([name.text]).get(name.text) == data:
        return "known"
    store.put(name.text, data)
    if same:
        return "updated"
    known.append(name)
    if len(known) == 1:
        return "added"
    return "updated" if ranked(known)[0].text == name.text else "older"


def sound(reader: Reader, text: str, data: bytes | RecordDamaged) -> tuple[Record, Name, bytes]:
    """The record under a store's key, its name and its bytes. Raises RecordDamaged if it is
    refused."""
    name = Name.parse(text, reader.keyring)
    if name is None:
        raise RecordDamaged(f"{text[:80]!r}: no name of a record")
    if isinstance(data, RecordDamaged):
        raise data
    return reader.read(name, data)[0], name, data


def carry_artifacts(
    records: Records, source: Store, store: Store, places: Collection[str]
) -> Iterator[Carried]:
    """Copy the artifacts of some records into another store, replacing others under their name:
    only those that the reader or their team signed. Raises StoreError if one of the two fails."""
    artifacts = records.artifacts
    if not store.takes_blobs or not artifacts.most:
        return
    there = store.sizes()
    for label in artifacts.on(source):
        if not label.trusted or label.record_key not in places:
            continue
        outcome: Outcome = "updated" if label.text in there else "added"
        try:
            packed = artifacts.checked(source, label)
            if packed is None:
                continue
            same_size = there.get(label.text) == len(packed)
            if same_size and store.get(label.text, len(packed)) == packed:
                outcome = "known"
            else:
                store.put(label.text, packed)
        except (Unauthorized, RecordDamaged) as exc:  # another's on a server, or too large for it
            yield Carried(name=label.name, outcome="refused", reason=str(exc))
        else:
            what = f"{size(len(packed))} of artifacts"
            yield Carried(name=label.name, outcome=outcome, target=what)


def contents(store: Store) -> Iterator[tuple[str, bytes | RecordDamaged]]:
    """Every version of every record in a store."""
    names = [text for text in store.keys() if Name.parse(text)]
    for start in range(0, len(names), AT_ONCE):
        yield from store.get_many(names[start : start + AT_ONCE]).items()


def sync(records: Records, wanted: Wanted = every) -> Iterator[Carried]:
    """Copy every version that the first of two stores has into the second, and its artifacts if
    you or your team signed them; say what became of each. No record there is changed or lost, so
    stores may be synced in any order. Raises StoreError if one of the two fails."""
    if len(records.stores) != 2:
        raise UsageError("sync: expected one store for each side")
    here, there = records.stores
    if here.url == there.url:
        raise UsageError(f"sync: both are {here.url}")
    if not here.keys():
        raise UsageError(f"sync: there is nothing in {here.url}")
    there.check_writable()
    places: set[str] = set()
    for one in carry(contents(here), records, there, wanted):
        if one.outcome != "refused" and (name := Name.parse(one.name)):
            places.add(name.record_key)
        yield one
    yield from carry_artifacts(records, here, there, places)


def export(records: Records, path: Path, wanted: Wanted = every) -> int:
    """Write the newest version of each record into a pack. Returns how many; what could not
    be read is in `records.damaged` and `records.unreachable`.

    Raises:
        StoreError: no store can be read, or the file cannot be written. NoRecord: nothing fits.
    """
    chosen = [one for one in records.held() if wanted(one.record)]
    if not chosen:
        why = "; ".join(["", *records.unreachable])
        raise NoRecord(f"export: no record fits; to see what there is, run: advisor show{why}")
    texts = {text: one.store for one in chosen for text in one.texts}
    found = ((text, texts[text].get(text)) for text in sorted(texts))
    write(path, ((text, data) for text, data in found if data is not None))
    return len({one.name.record_key for one in chosen})


def unpack(path: Path, records: Records, wanted: Wanted = every) -> tuple[Store, Iterator[Carried]]:
    """Copy a pack's records into the first store that can be written: that store, and what became
    of each record.

    Raises:
        UsageError: there is no such file. StoreError: it is no pack, or no store can be written.
    """
    if not path.is_file():
        raise UsageError(f"import {str(path)!r}: there is no such file")
    store = records.first_writable()
    return store, carry(PackStore(path).members(), records, store, wanted)
