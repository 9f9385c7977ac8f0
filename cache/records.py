"""Records in one or several stores."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.cache.codec import encode, opened, reason_in, reason_of
from advisor.cache.name import MARKS, PREFIX, Mark, Name, ranked, target_part
from advisor.cache.record import Record, Target
from advisor.cache.seal import UNSEALED, Seal
from advisor.cache.stores import Remote, Store, studies_of
from advisor.cache.stores.filesystem import beside
from advisor.cache.stores.patience import go_on
from advisor.errors import RecordDamaged, StoreError, UsageError

Check = Callable[[Record], str]
"""What is wrong with a record, or '': what the cache cannot know, as a knob's domain."""

_ID = re.compile(r"([0-9a-f]{1,12})(?:@([0-9]{0,10}))?")


def _nothing_wrong(_record: Record) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A record and where it is.

    Attributes:
        name: of the version that counts; `texts` all that a store needs to say the same: beside
            it a mark, and the version under the target's name if that is another one.
        trusted: the reader or their team measured it, and signed it.
    """

    record: Record
    name: Name
    store: Store
    texts: tuple[str, ...]
    trusted: bool

    @property
    def of(self) -> tuple[str, Target]:
        """Which record it is, and under which target's name."""
        return self.name.place, self.record.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a store holds: of each record and each of its targets the version that counts.
    `damaged`: one line for each that could not be read."""

    held: tuple[Held, ...]
    damaged: tuple[str, ...]


Marks = dict[tuple[str, str], tuple[Mark, Store]]
"""The newest mark that counts for the reader on each version, and where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """Which records are looked for: what is None or '' does not matter.

    Attributes:
        model: the whole fingerprint; `id` the start of a key's.
        target: a target's name; `origins` some places where it may lie.
    """

    model: str | None = None
    target: str | None = None
    origins: frozenset[str] | None = None
    id: str = ""
    batch: int | None = None

    @property
    def parts(self) -> frozenset[str] | None:
        """What names of it hold, of which one suffices; None where any name will do."""
        if self.target is not None:
            return frozenset((target_part(self.target),))
        return None if self.origins is None else frozenset(map(target_part, self.origins))

    def is_of(self, name: Name) -> bool:
        """Whether a name is of such an id and batch."""
        return name.id.startswith(self.id) and self.batch in (None, name.batch)

    def fits(self, record: Record) -> bool:
        """Whether a record is of this model, target and origin."""
        target = record.target
        return (
            self.model in (None, record.key.model)
            and self.target in (None, target.name)
            and (self.origins is None or target.origin in self.origins)
        )


EVERYTHING = Sought()
AT_ONCE = 64
"""Records fetched from a store in one exchange."""


class Records:
    """The records in some stores, which are looked up in order.

    Attributes:
        stores: where they are.
        damaged: one line for each record that the last `all`, `held` or `get` could not read.
        unreachable: one line for each store that they could not read.
        stuck: one line for each version that the last `remove` could not.
    """

    def __init__(
        self,
        stores: Store | Sequence[Store],
        *,
        seal: Seal = UNSEALED,
        check: Check = _nothing_wrong,
    ) -> None:
        self.stores = tuple(stores) if isinstance(stores, Sequence) else (stores,)
        self.damaged: list[str] = []
        self.unreachable: list[str] = []
        self.stuck: list[str] = []
        self._seal = seal
        self._check = check

    @property
    def studies(self) -> Path:
        """The folder for studies.

        Raises:
            StoreError: a link lies in its place. UsageError: the user has no folder.
        """
        return studies_of(self.stores)

    def study(self, name: str) -> Path:
        """The file of a study, 'NAME.journal' or 'NAME.lock', checked to be no way elsewhere.

        Raises:
            UsageError: the name is none. StoreError: a link lies in its place.
        """
        return beside(self.studies, name)

    def look_into(
        self, store: Store, sought: Sought = EVERYTHING, marks: Marks | None = None
    ) -> Listing:
        """What one store has of what is sought.

        Args:
            marks: those of the stores before it; this one's are added.

        Raises:
            StoreError: the store cannot be read.
        """
        texts = store.keys()
        marks = {} if marks is None else marks
        self._mark(marks, store, texts)
        look = _Look(self, store, sought, marks)
        orders = [
            ranked(names, _stale(names, marks))
            for names in self._places(texts, sought).values()
            if sought.is_of(names[0])
        ]
        for start in range(0, len(orders), AT_ONCE):
            look.take(orders[start : start + AT_ONCE])
        return Listing(
            held=tuple(one for one in look.held if sought.fits(one.record)),
            damaged=tuple(look.damaged),
        )

    def _places(self, texts: Iterable[str], sought: Sought) -> dict[str, list[Name]]:
        """All versions of each record that has one of this model, target and origin."""
        model = sought.model
        start = f"{PREFIX}{model[:12]}/" if model is not None else PREFIX
        texts = [text for text in texts if text.startswith(start)]
        wanted: set[str] | None = None
        if (parts := sought.parts) is not None:  # before names are taken apart: there are many
            among = [text for text in texts if text[20:32] in parts or text[33:45] in parts]
            wanted = {name.place for text in among if (name := Name.parse(text))}
            starts = tuple({f"{PREFIX}{place[:13]}" for place in wanted})
            texts = [text for text in texts if text.startswith(starts)]
        places: dict[str, list[Name]] = {}
        for number, text in enumerate(texts):
            if not number % 256:
                go_on()
            name = Name.parse(text, self._seal)
            if name is not None and (wanted is None or name.place in wanted):
                places.setdefault(name.place, []).append(name)
        return places

    def _mark(self, marks: Marks, store: Store, texts: Iterable[str]) -> None:
        for text in texts:
            if not text.startswith(MARKS):
                continue
            mark = self.parse_mark(text)
            if mark is None:
                continue
            known = marks.get(mark.version_of)
            if known is None or (known[0].made, known[0].digest) < (mark.made, mark.digest):
                marks[mark.version_of] = mark, store

    def reason(self, mark: Mark, store: Store) -> str | None:
        """Why a version is stale, '' where it is not; None where the mark cannot be read."""
        try:
            data = store.get(mark.text)
            return None if data is None else reason_in(data, self._seal)
        except StoreError:
            return None

    def parse(self, text: str) -> Name | None:
        """The name that a store's key is, trusted where the reader's keys tagged it."""
        return Name.parse(text, self._seal)

    def parse_mark(self, text: str) -> Mark | None:
        """The mark that a store's key is; None where the reader's keys did not tag it."""
        mark = Mark.parse(text, self._seal)
        return mark if mark is not None and mark.trusted else None

    def is_ours(self, name: Name) -> bool:
        """Whether the reader or their team wrote it; of a reader without any key, anybody did."""
        return name.trusted or not self._seal.signs

    def names(self, store: Store) -> list[Name]:
        """The names of the records in a store, versions that no longer count included."""
        return [name for text in store.keys() if (name := Name.parse(text, self._seal))]

    def read(self, name: Name, data: bytes | RecordDamaged) -> Record:
        """The record in what `get_many` gave, if it may be used and is what its name says.

        Raises:
            RecordDamaged: why not.
        """
        return self.opened(name, data)[0]

    def opened(self, name: Name, data: bytes | RecordDamaged) -> tuple[Record, bool]:
        """The same, and whether one of the reader's keys signed it."""
        if isinstance(data, RecordDamaged):
            raise data
        record, signed = opened(data, self._seal)
        if wrong := self._check(record):
            raise RecordDamaged(f"record: {wrong}; refused")
        if Name.of(record, data).untagged != name.untagged:
            raise RecordDamaged(f"record: it is not what its name {name.text} says; refused")
        if name.trusted and not signed:
            raise RecordDamaged("record: its name is signed and it is not; refused")
        return record, signed and name.trusted

    def held(self, sought: Sought = EVERYTHING) -> list[Held]:
        """What all stores have; of the same record in several, the version that counts.

        Raises:
            StoreError: no store can be read.
        """
        self.damaged, self.unreachable = [], []
        found: list[Held] = []
        failed: StoreError | None = None
        marks: Marks = {}
        for store in self.stores:
            try:
                listing = self.look_into(store, sought, marks)
            except StoreError as exc:
                failed = failed or exc
                self.unreachable.append(str(exc))
                continue
            self.damaged += listing.damaged
            found += listing.held
        if failed is not None and len(self.unreachable) == len(self.stores):
            raise failed
        return united(found)

    def each(self) -> list[Held]:
        """Every record that can be read, once, under the target's name of what counts."""
        return list(_once(self.held()).values())

    def all(self) -> list[Record]:
        """As `each`, without where they are."""
        return [one.record for one in self.each()]

    def get(self, id_prefix: str) -> Record:
        """As `one`, without where it is."""
        return self.one(id_prefix).record

    def one(self, id_prefix: str) -> Held:
        """The one record that 'abc', 'ae1bff61eea5' or 'ae1bff61eea5@64' names.

        Raises:
            UsageError: none does, or several do. RecordDamaged: it cannot be read.
        """
        key, batch = _id(id_prefix)
        found = _once(self.held(Sought(id=key, batch=batch)))
        ids = {_record_id(place) for place in found}
        ids |= {line.partition(":")[0] for line in self.damaged}
        _one_of(ids, id_prefix)
        if not found:
            raise RecordDamaged("; ".join(self.damaged))
        return next(iter(found.values()))

    def named(self, id_prefix: str | None = None) -> list[tuple[Store, Name | Mark]]:
        """Every version, readable or not, of the one record that a text names as for `get`, and
        the marks on them; of all records for None. What cannot be listed is in `unreachable`.

        Raises:
            UsageError: no record is named so, or several are.
        """
        key, batch = ("", None) if id_prefix is None else _id(id_prefix)
        self.unreachable = []
        found: list[tuple[Store, Name | Mark]] = []
        for store in self.stores:
            try:
                texts = store.keys()
            except StoreError as exc:
                self.unreachable.append(str(exc))
                continue
            for text in texts:
                one = Name.parse(text, self._seal) or Mark.parse(text, self._seal)
                if one is None:
                    continue
                id, _, at = one.record_id.partition("@")
                if id.startswith(key) and batch in (None, int(at)):
                    found.append((store, one))
        if id_prefix is not None:
            _one_of({one.record_id for _store, one in found}, id_prefix)
        return found

    def put(self, record: Record, *, revises: Record | None = None) -> Store:
        """Keep it in the first store that can be written; which one that is.

        A signature says that its owner measured what is in a record. So a revision is signed only
        where what it revises was; of another's record a new stale mark is kept beside it, signed,
        and any other revision is kept without a signature.

        Args:
            revises: what it was made of: what a newer version of advisor put there stays. The same
                record under another target's name is a revision too.

        Raises:
            StoreError: no store can be written. RecordDamaged: it is no sound record.
        """
        self._seal = self._seal.ready()
        before = self._held_as(revises) if revises is not None else None
        if revises is not None and before is not None and not before.trusted and self._seal.signs:
            same = dataclasses.replace(record, stale=revises.stale, revised=revises.revised)
            if same == revises:
                data = reason_of(record.stale, self._seal)
                made = record.revised or time.time()
                mark = Mark.on(before.name, bool(record.stale), made, data, self._seal)
                return self._put(mark.text, data)
        foreign = revises is not None and (before is None or not before.trusted)
        seal = UNSEALED if foreign else self._seal
        there = b"" if before is None else before.store.get(before.name.text) or b""
        data = encode(record, seal, revises=there)
        name = Name.of(opened(data)[0], data, seal)
        return self._put(name.text, data)

    def add_name(self, record: Record, target: Target, name: str) -> Record:
        """Keep a record under another target's name too; that one is returned.

        Args:
            name: of the target, as its task has it.

        Raises:
            StoreError: no store can be written.
        """
        task = dataclasses.replace(record.key.task, target=name)
        key = dataclasses.replace(record.key, task=task)
        named = dataclasses.replace(record, key=key, target=target)
        self.put(named, revises=record)
        return named

    def _put(self, text: str, data: bytes) -> Store:
        self.unreachable = []
        failed: StoreError | None = None
        for store in self.stores:
            try:
                store.put(text, data)
            except StoreError as exc:
                failed = failed or exc
                self.unreachable.append(str(exc))
            else:
                return store
        assert failed is not None
        raise failed

    def _held_as(self, record: Record) -> Held | None:
        with contextlib.suppress(StoreError):
            key = record.key
            for one in self.held(Sought(model=key.model, id=key.id, batch=record.batch)):
                if one.record == record:
                    return one
        return None

    def health(self, store: Store) -> str:
        """What a store says of itself, and how many of its records cannot be used."""
        said = store.health()
        if not said.startswith("ok"):
            return said
        try:
            listing = self.look_into(store)
        except StoreError as exc:
            return f"unusable: {exc}"
        number = len(_once(listing.held))
        count = f"{number} record{'s' * (number != 1)}"
        bad = f", {len(listing.damaged)} unreadable" if listing.damaged else ""
        return f"{said}: {count}{bad}"

    @staticmethod
    def copy(one: Held, store: Store) -> None:
        """Put a record into another store, if that has it not.

        Raises:
            StoreError: one of the stores cannot be read or written.
        """
        there = store.get_many(one.texts)
        for text, data in one.store.get_many(one.texts).items():
            if isinstance(data, bytes) and there.get(text) != data:
                store.put(text, data)

    def keep(self, one: Held) -> None:
        """Copy a record into the first local store that takes it.

        Raises:
            StoreError: none does, or its own store cannot be read any more.
        """
        local = [store for store in self.stores if not isinstance(store, Remote)]
        if local:
            self.copy(one, _first_writable(local))

    def first_writable(self) -> Store:
        """The first store that can be written.

        Raises:
            StoreError: none can; what the first one says.
        """
        return _first_writable(self.stores)

    def versions(self, record: Record) -> list[tuple[Store, Name]]:
        """Every version of a record in every store that can be read; `unreachable`: the others."""
        found = []
        self.unreachable = []
        place = f"{record.key.model[:12]}/{record.key.id}/{record.batch}"
        for store in self.stores:
            try:
                names = self.names(store)
            except StoreError as exc:
                self.unreachable.append(str(exc))
                continue
            found += [(store, name) for name in names if name.place == place]
        return found

    def remove(self, versions: Iterable[tuple[Store, Name | Mark]]) -> int:
        """Remove exactly these; how many were there. `stuck` has a line for each that stays."""
        count = 0
        self.stuck = []
        for store, name in versions:
            try:
                count += store.delete(name.text)
            except StoreError as exc:
                self.stuck.append(f"{name.record_id}: {exc}")
        return count

    def delete(self, record: Record) -> bool:
        """Remove every version of a record from every store that can be read; whether it was there.

        Raises:
            StoreError: a store that has it cannot be written.
        """
        return any([store.delete(name.text) for store, name in self.versions(record)])


class _Look:
    """One look into a store: what is found there, place by place."""

    def __init__(self, records: Records, store: Store, sought: Sought, marks: Marks) -> None:
        self.held: list[Held] = []
        self.damaged: list[str] = []
        self._records, self._store, self._marks = records, store, marks
        self._parts = sought.parts
        self._fetched: dict[str, bytes | RecordDamaged | None] = {}

    def take(self, orders: Sequence[Sequence[Name]]) -> None:
        """Of each record, whose versions are given in their order, the one that counts.

        That one comes in one exchange for all; another is fetched where it is no sound record.
        """
        first = [names[0].text for names in orders]
        self._fetched = {**dict.fromkeys(first), **self._store.get_many(first)}
        for names in orders:
            for name in names:
                if found := self._sound(name):
                    self._keep(name, names, *found)
                    break  # versions behind the one that counts are not looked at

    def _sound(self, name: Name) -> tuple[Record, bool] | None:
        go_on()
        if name.text not in self._fetched:
            self._fetched.update(self._store.get_many([name.text]))
        data = self._fetched.get(name.text)
        if data is None:  # removed since it was listed
            return None
        try:
            return self._records.opened(name, data)
        except RecordDamaged as exc:
            self.damaged.append(f"{name.record_id}: {exc}")
            return None

    def _keep(self, name: Name, names: Sequence[Name], record: Record, trusted: bool) -> None:
        """The version that counts, under each of the record's names that is looked for."""
        texts = [name.text]
        if found := self._marks.get((name.place, name.version.digest)):
            mark, store = found
            reason = self._records.reason(mark, store)
            if reason is not None and bool(reason) == mark.stale:
                record = dataclasses.replace(record, stale=reason)
            if store is self._store:
                texts.append(mark.text)
        called = {one.called for one in names if self._wants(one)} | {name.called}
        for other in sorted(called):
            if other == name.called:
                self._add(record, name, texts, trusted)
                continue
            for alias in names:
                # What others call a record of the reader's own is not taken for granted.
                if alias.called != other or alias.trusted < name.trusted:
                    continue
                known = self._sound(alias)
                if known and known[0].key.digest == record.key.digest:
                    named = dataclasses.replace(record, key=known[0].key, target=known[0].target)
                    self._add(named, name, [*texts, alias.text], trusted)
                    break

    def _wants(self, name: Name) -> bool:
        return self._parts is None or not self._parts.isdisjoint(name.called)

    def _add(self, record: Record, name: Name, texts: Sequence[str], trusted: bool) -> None:
        self.held.append(
            Held(
                record=record,
                name=name,
                store=self._store,
                texts=tuple(texts),
                trusted=trusted,
            )
        )


def united(held: Iterable[Held]) -> list[Held]:
    """Of the same record under one target's name in several stores, the version that counts."""
    places: dict[tuple[str, Target], list[Held]] = {}
    for one in held:
        places.setdefault(one.of, []).append(one)
    found = []
    for several in places.values():
        stale = {one.name.text: bool(one.record.stale) for one in several}
        first = ranked([one.name for one in several], stale)[0]
        found.append(next(one for one in several if one.name.text == first.text))
    return found


def _stale(
    names: Iterable[Name], marks: Mapping[tuple[str, str], tuple[Mark, Store]]
) -> dict[str, bool]:
    """What marks say of versions, by their name's text."""
    return {
        name.text: mark[0].stale
        for name in names
        if (mark := marks.get((name.place, name.version.digest)))
    }


def _once(held: Iterable[Held]) -> dict[str, Held]:
    """Each record once, by its place; under the name of the version itself if it is among them."""
    found: dict[str, Held] = {}
    for one in held:
        target = one.record.target
        own = (target_part(target.name), target_part(target.origin)) == one.name.called
        if own or one.name.place not in found:
            found[one.name.place] = one
    return found


def _record_id(place: str) -> str:
    _model, id, batch = place.split("/")
    return f"{id}@{batch}"


def _id(text: str) -> tuple[str, int | None]:
    found = _ID.fullmatch(text)
    if not found:
        raise UsageError(f"key {text[:80]!r}: expected one as ae1bff61eea5@64; run: advisor show")
    return found[1], int(found[2]) if found[2] else None


def _one_of(ids: Iterable[str], text: str) -> None:
    listed = sorted(ids)
    if not listed:
        raise UsageError(f"key {text!r}: no such record; run: advisor show")
    if len(listed) > 1:
        raise UsageError(f"key {text!r}: several begin so: {', '.join(listed)}; give more")


def _first_writable(stores: Sequence[Store]) -> Store:
    for store in stores:
        with contextlib.suppress(StoreError):
            store.check_writable()
            return store
    stores[0].check_writable()
    return stores[0]


def be_patient(stores: Iterable[Store], seconds: float) -> None:
    """Let remote stores take so long: for a command that a person waits for."""
    for store in stores:
        if isinstance(store, Remote):
            store.patience_s = max(store.patience_s, seconds)
