"""Records from store to store, into packs and out of them, and what may be thrown away.

Encoded records travel as they are, so that nothing a newer version wrote into them is lost, and
each signature stays its owner's.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from advisor.cache.artifacts import Idle, compiled_of
from advisor.cache.codec import content
from advisor.cache.match import place_of
from advisor.cache.name import MARKS, Mark, Name, ranked
from advisor.cache.reader import AT_ONCE, Marks, Reader, stale_of
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.shown import size
from advisor.cache.stores import Store
from advisor.cache.stores.pack import read, write
from advisor.errors import RecordDamaged, StoreError, Unauthorized

Outcome = Literal["added", "updated", "older", "marked", "known", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What became of one record: 'added' is of a key that was not there, 'updated' counts from now
    on, 'older' was kept beside one that counts more, 'marked' is a mark on one, 'known' was there.
    `reason`: why refused."""

    name: str
    outcome: Outcome
    target: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """What may go, and why."""

    name: Name | Mark
    reason: str


def carry(
    source: Iterable[tuple[str, bytes | RecordDamaged]],
    records: Records,
    store: Store,
    wanted: Callable[[Record], bool] = lambda _record: True,
) -> Iterator[Carried]:
    """Put what may be used of a source into a store, one after another; what became of each.

    Marks follow the records that they are on.

    Raises:
        StoreError: the store cannot be read or written; the source cannot be read on.
    """
    there: dict[str, list[Name]] = {}
    for name in records.names(store):
        there.setdefault(name.place, []).append(name)
    marks: list[tuple[Mark, bytes]] = []
    taken: set[str] = set()
    for text, data in source:
        try:
            if mark := Mark.parse(text):
                marks.append((mark, sound_mark(mark, data)))
                continue
            record, name, data = sound(records, text, data)
        except RecordDamaged as exc:
            yield Carried(name=text, outcome="refused", reason=str(exc))
            continue
        if not wanted(record):
            continue
        taken.add(name.place)
        try:
            outcome = _put(store, name, data, there.setdefault(name.place, []))
        except RecordDamaged as exc:  # as a server of another version says
            yield Carried(name=text, outcome="refused", reason=str(exc))
            continue
        yield Carried(name=name.text, outcome=outcome, target=record.target.name)
    for mark, data in marks:
        if mark.place in taken and store.get_many([mark.text]).get(mark.text) != data:
            store.put(mark.text, data)
            yield Carried(name=mark.text, outcome="marked")


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
    name = reader.parse(text)
    if name is None:
        raise RecordDamaged(f"{text[:80]!r}: no name of a record")
    if isinstance(data, RecordDamaged):
        raise data
    return reader.read(name, data), name, data


def sound_mark(mark: Mark, data: bytes | RecordDamaged) -> bytes:
    """The bytes of a mark, if they are what its name says.

    Raises:
        RecordDamaged: why not.
    """
    if isinstance(data, RecordDamaged):
        raise data
    content(data)
    if hashlib.sha256(data).hexdigest()[: len(mark.digest)] != mark.digest:
        raise RecordDamaged(f"mark on {mark.record_id}: it is not what its name says; refused")
    return data


def carry_artifacts(
    records: Records, source: Store, store: Store, places: Collection[str]
) -> Iterator[Carried]:
    """Put the artifacts of some records into another store, as they are, in place of others under
    their name: those that the reader or their team signed, and no others.

    Raises:
        StoreError: one of the stores cannot be read or written.
    """
    if not store.takes_blobs:
        return
    there = store.sizes()
    for label, packed in records.artifacts.sound(source, places):
        if isinstance(packed, RecordDamaged):
            yield Carried(name=label.text, outcome="refused", reason=str(packed))
            continue
        outcome: Outcome = "updated" if label.key in there else "added"
        if there.get(label.key) == len(packed) and records.artifacts.has(store, label, packed):
            outcome = "known"
        try:
            if outcome != "known":
                store.put(label.key, packed)
        except (Unauthorized, RecordDamaged) as exc:  # another's on a server, or too large for it
            yield Carried(name=label.text, outcome="refused", reason=str(exc))
            continue
        yield Carried(name=label.text, outcome=outcome, target=f"{size(len(packed))} of artifacts")


def contents(store: Store) -> Iterator[tuple[str, bytes | RecordDamaged]]:
    """Every version of every record in a store, and every mark."""
    names = [text for text in store.keys() if Name.parse(text) or Mark.parse(text)]
    for start in range(0, len(names), AT_ONCE):
        yield from store.get_many(names[start : start + AT_ONCE]).items()


def export(
    records: Records, path: Path, wanted: Callable[[Record], bool] = lambda _record: True
) -> tuple[int, list[str]]:
    """Write the records that count into a pack, with their marks and all their targets' names: how
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
    return len({one.name.place for one in chosen}), records.damaged


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


def waste(records: Records, store: Store) -> list[Waste]:
    """What a store can do without, of what the reader or their team signed.

    That is: versions behind one of at least their effort under the same target's name; marks that
    others came after, or whose version is gone; and a record that its GPU has outlived, where the
    same GPU was measured later under another driver, again for this task with at least the effort.
    Whatever others wrote, and what is the only record for its environment, stays.

    Raises:
        StoreError: the store cannot be read.
    """
    texts = store.keys()
    names = [name for text in texts if (name := records.parse(text)) and name.trusted]
    marks = [
        mark for text in texts if text.startswith(MARKS) and (mark := records.parse_mark(text))
    ]
    newest: Marks = {}
    records.mark(newest, store, texts)
    versions = {(name.place, name.version.digest) for text in texts if (name := Name.parse(text))}
    found = [
        Waste(name=mark, reason="superseded")
        for mark in marks
        if newest[mark.version_of][0] != mark or mark.version_of not in versions
    ]
    counting: list[tuple[Name, Record]] = []
    groups: dict[tuple[str, str, str], list[Name]] = {}
    for name in names:
        groups.setdefault((name.place, *name.called), []).append(name)
    for group in groups.values():
        first: Name | None = None
        for name in ranked(group, stale_of(group, newest)):
            if first is not None:
                if name.version.effort <= first.version.effort:
                    found.append(Waste(name=name, reason="superseded"))
                continue
            with contextlib.suppress(RecordDamaged):  # not for this version to judge
                data = store.get_many([name.text]).get(name.text)
                if data is not None:
                    counting.append((name, records.read(name, data)))
                    first = name
    return [*found, *_outlived(counting)]


def idle(records: Records, store: Store) -> list[Idle]:
    """Artifacts in a store that no record there leads to any more, of what the reader or their team
    signed.

    Raises:
        StoreError: the store cannot be read.
    """
    advised: dict[str, set[str]] = {name.place: set() for name in records.names(store)}
    if store.sizes():
        for one in records.look_into(store).held:
            configs = (winner.choice.config for winner in one.record.winners)
            advised[one.name.place] |= {compiled_of(one.record, config) for config in configs}
    return list(records.artifacts.idle(store, advised))


def _outlived(counting: Iterable[tuple[Name, Record]]) -> Iterator[Waste]:
    """Records of a GPU that runs under another driver by now, and was measured again."""
    machines: dict[str, list[tuple[Name, Record]]] = {}
    for name, record in counting:
        if record.provenance.device_uuid:  # else nobody knows which machine it was
            machines.setdefault(record.provenance.device_uuid, []).append((name, record))
    for there in machines.values():
        _name, last = max(there, key=lambda pair: pair[1].provenance.created)
        now = _driver(last)
        again = {
            (place_of(record.key), record.batch): name.version.effort
            for name, record in there
            if _driver(record) == now and not record.stale
        }
        for name, record in there:
            task = place_of(record.key), record.batch
            if _driver(record) != now and again.get(task, -1) >= name.version.effort:
                change = f"driver {_driver(record)} -> {now}"
                yield Waste(name=name, reason=f"stale: {change} on the same GPU since")


def _driver(record: Record) -> str:
    return record.key.environment.software.driver
