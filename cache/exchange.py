"""Records from store to store, into packs and out of them, and what may be thrown away.

Encoded records travel as they are, so that nothing a newer version wrote into them is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from advisor.cache.match import place_of
from advisor.cache.name import Name, ranked
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.stores import Store
from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.pack import read, write
from advisor.errors import RecordDamaged, StoreError

Outcome = Literal["added", "updated", "older", "known", "refused"]
AT_ONCE = 64
"""Records fetched from a store in one exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What became of one record: 'added' is of a key that was not there, 'updated' counts from now
    on, 'older' was kept beside one that counts more, 'known' was there. `reason`: why refused."""

    name: str
    outcome: Outcome
    target: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """A record that may go, and why."""

    name: Name
    reason: str


def carry(
    source: Iterable[tuple[str, bytes | RecordDamaged]],
    records: Records,
    store: Store,
    wanted: Callable[[Record], bool] = lambda _record: True,
) -> Iterator[Carried]:
    """Put what may be used of a source into a store, one after another; what became of each.

    Raises:
        StoreError: the store cannot be read or written; the source cannot be read on.
    """
    there: dict[str, list[Name]] = {}
    for name in Records.names(store):
        there.setdefault(name.place, []).append(name)
    for text, data in source:
        try:
            record, name, data = _sound(records, text, data)
        except RecordDamaged as exc:
            yield Carried(name=text, outcome="refused", reason=str(exc))
            continue
        if not wanted(record):
            continue
        known = there.setdefault(name.place, [])
        outcome: Outcome = "added"
        if any(one.text == name.text for one in known):
            # The same name is the same bytes, unless the copy there is damaged.
            outcome = "known"
            if store.get_many([name.text]).get(name.text) != data:
                store.put(name.text, data)
                outcome = "updated"
        else:
            store.put(name.text, data)
            if known:
                first = ranked([*known, name])[0]
                outcome = "updated" if first.text == name.text else "older"
            known.append(name)
        yield Carried(name=name.text, outcome=outcome, target=record.target.name)


def _sound(records: Records, text: str, data: bytes | RecordDamaged) -> tuple[Record, Name, bytes]:
    name = Name.parse(text)
    if name is None:
        raise RecordDamaged(f"{text[:80]!r}: no name of a record")
    if isinstance(data, RecordDamaged):
        raise data
    record = records.read(name, data)
    if not name.version.created:  # of a store before format 2: the same bytes, named as today's
        name = Name.of(record, data)
    return record, name, data


def contents(store: Store) -> Iterator[tuple[str, bytes | RecordDamaged]]:
    """Every version of every record in a store."""
    names = [name.text for name in Records.names(store)]
    for start in range(0, len(names), AT_ONCE):
        yield from store.get_many(names[start : start + AT_ONCE]).items()


def export(
    records: Records, path: Path, wanted: Callable[[Record], bool] = lambda _record: True
) -> tuple[int, list[str]]:
    """Write the records that count into a pack: how many, and a line for each that cannot be read.

    Raises:
        StoreError: no store can be read, or the file cannot be written.
    """
    chosen = [one for one in records.held() if wanted(one.record)]

    def found() -> Iterator[tuple[str, bytes]]:
        for one in chosen:
            data = one.store.get(one.name.text)
            if data is not None:
                yield Name.of(one.record, data).text, data

    return write(path, found()), records.damaged


def unpack(
    path: Path,
    records: Records,
    store: Store,
    wanted: Callable[[Record], bool] = lambda _record: True,
) -> Iterator[Carried]:
    """Take a pack's records into a store; see `carry`.

    Raises:
        StoreDamaged: the file is no pack, or was cut; what came before is in the store.
        StoreError: the file cannot be read, or the store not written.
    """
    try:
        yield from carry(
            ((name, data) for name, _place, data in read(path)), records, store, wanted
        )
    except OSError as exc:
        raise StoreError(f"pack {path}: {exc.strerror or exc}") from exc


def waste(
    records: Records, store: Store, *, is_outdated: Callable[[Record], str]
) -> Iterator[Waste]:
    """What a store can do without: versions that no longer count, records marked stale, and those
    that `is_outdated` gives a reason for while a sound one of the same place is there.

    Raises:
        StoreError: the store cannot be read.
    """
    places: dict[str, list[Name]] = {}
    for name in Records.names(store):
        places.setdefault(name.place, []).append(name)
    counting: list[tuple[Name, Record]] = []
    for names in places.values():
        ordered = ranked(names)
        for position, name in enumerate(ordered):
            data = store.get_many([name.text]).get(name.text)
            if data is None:
                continue
            with contextlib.suppress(RecordDamaged):  # not for this version to judge
                counting.append((name, records.read(name, data)))
                for later in ordered[position + 1 :]:
                    yield Waste(name=later, reason="superseded")
                break
    fresh = {
        place_of(record.key)
        for _name, record in counting
        if not record.stale and not is_outdated(record)
    }
    for name, record in counting:
        if record.stale:
            yield Waste(name=name, reason=f"stale: {record.stale}")
        elif (why := is_outdated(record)) and place_of(record.key) in fresh:
            yield Waste(name=name, reason=f"stale: {why}")


def tidy(store: Store) -> int:
    """Remove what killed writers left in a folder of files; how many files."""
    return store.tidy() if isinstance(store, DirStore) else 0
