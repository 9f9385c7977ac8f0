"""Records from store to store, into packs and out of them.

Encoded records travel as they are, so that nothing a newer version wrote into them is lost, and
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
from advisor.cache.stores.pack import read, write
from advisor.errors import RecordDamaged, StoreError, Unauthorized

Outcome = Literal["added", "updated", "older", "known", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What became of one record: 'added' is of a key that was not there, 'updated' counts from now
    on, 'older' was kept beside one that counts more, 'known' was there.
    `reason`: why refused."""

    name: str
    outcome: Outcome
    target: str = ""
    reason: str = ""


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
    for name in records.names(store):
        there.setdefault(name.record_key, []).append(name)
    for text, data in source:
        try:
            record, name, data = sound(records, text, data)
        except RecordDamaged as exc:
            yield Carried(name=text, outcome="refused", reason=str(exc))
            continue
        if not wanted(record):
            continue
        try:
            outcome = _put(store, name, data, there.setdefault(name.record_key, []))
        except RecordDamaged as exc:  # as a server of another version says
            yield Carried(name=text, outcome="refused", reason=str(exc))
            continue
        yield Carried(name=name.text, outcome=outcome, target=record.target.name)


def _put(store: Store, name: Name, data: bytes, known: list[Name]) -> Outcome:
    """Put a version beside those that are known, and among them."""
    if any(one.text == name.text for one in known):
        # The same name is the same bytes, unless the copy there is damaged.
        if store.get_many([name.text]).get(name.text) == data:
            return "known"
        store.put(name.text, data)
        return "updated"
    store.put(name.text, data)
    outcome: Outcome = "added"
    if known:
        first = ranked([*known, name])[0]
        outcome = "updated" if first.text == name.text else "older"
    known.append(name)
    return outcome


def sound(reader: Reader, text: str, data: bytes | RecordDamaged) -> tuple[Record, Name, bytes]:
    """The record that a store has under this key, if it may be used and is what that says.

    Raises:
        RecordDamaged: why not.
    """
    name = Name.parse(text, reader.keyring)
    if name is None:
        raise RecordDamaged(f"{text[:80]!r}: no name of a record")
    if isinstance(data, RecordDamaged):
        raise data
    return reader.read(name, data)[0], name, data


def carry_artifacts(
    records: Records, source: Store, store: Store, places: Collection[str]
) -> Iterator[Carried]:
    """Put the artifacts of some records into another store, as they are, in place of others under
    their name: those that the reader or their team signed, and no others.

    Raises:
        StoreError: one of the stores cannot be read or written.
    """
    artifacts = records.artifacts
    if not store.takes_blobs or not artifacts.most:
        return
    there = store.sizes()
    for label in artifacts.on(source):
        if not label.trusted or label.record_key not in places:
            continue
        try:
            packed = artifacts.checked(source, label)
            if packed is None:
                continue
            outcome: Outcome = "updated" if label.text in there else "added"
            # Of the same size it may still be damaged.
            if (
                there.get(label.text) == len(packed)
                and store.get(label.text, len(packed)) == packed
            ):
                outcome = "known"
            else:
                store.put(label.text, packed)
        except (Unauthorized, RecordDamaged) as exc:  # another's on a server, or too large for it
            yield Carried(name=label.name, outcome="refused", reason=str(exc))
            continue
        yield Carried(name=label.name, outcome=outcome, target=f"{size(len(packed))} of artifacts")


def contents(store: Store) -> Iterator[tuple[str, bytes | RecordDamaged]]:
    """Every version of every record in a store."""
    names = [text for text in store.keys() if Name.parse(text)]
    for start in range(0, len(names), AT_ONCE):
        yield from store.get_many(names[start : start + AT_ONCE]).items()


def export(
    records: Records, path: Path, wanted: Callable[[Record], bool] = lambda _record: True
) -> tuple[int, list[str]]:
    """Write the records that count into a pack, with all their targets' names: how
    many, and a line for each that cannot be read.

    Raises:
        StoreError: no store can be read, or the file cannot be written.
    """
    chosen = [one for one in records.held() if wanted(one.record)]
    texts = {text: one.store for one in chosen for text in one.texts}

    def found() -> Iterator[tuple[str, bytes]]:
        for text, store in sorted(texts.items(), key=lambda pair: pair[0]):
            data = store.get(text)
            if data is not None:
                yield text, data

    write(path, found())
    return len({one.name.record_key for one in chosen}), records.damaged


def unpack(
    path: Path,
    records: Records,
    store: Store,
    wanted: Callable[[Record], bool] = lambda _record: True,
) -> Iterator[Carried]:
    """Take a pack's records into a store; see `carry`.

    Raises:
        StoreDamaged: the file is no pack, or was cut.
        StoreError: the file cannot be read, or the store not written.
    """
    try:
        yield from carry(read(path), records, store, wanted)
    except OSError as exc:
        raise StoreError(f"pack {path}: {exc.strerror or exc}") from exc
