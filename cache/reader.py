"""What a reader finds in one store: of each record the version that counts for them.

Names and marks tell which that is (see `name`); it alone is fetched, and another only where it is
no sound record.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from advisor.cache.codec import opened, reason_in, to_plain
from advisor.cache.key import Key, fields
from advisor.cache.match import Query
from advisor.cache.name import (
    MARKS,
    ORIGIN,
    PREFIX,
    TARGET,
    Mark,
    Name,
    called,
    command_part,
    ranked,
    target_part,
)
from advisor.cache.record import Record, Target
from advisor.cache.seal import UNSEALED, Seal
from advisor.cache.stores import Narrowing, Store
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import RecordDamaged, StoreError

Check = Callable[[Record], str]
"""What is wrong with a record, or '': what the cache cannot know, as a knob's domain."""


def nothing_wrong(_record: Record) -> str:
    return ""


class Held(Struct, frozen=True, kw_only=True):
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

    @property
    def under_own_name(self) -> bool:
        """Whether the version that counts was written under this target's name itself."""
        return called(self.record.target) == self.name.called


class Listing(Struct, frozen=True, kw_only=True):
    """What a store holds: of each record and each of its targets the version that counts.
    `damaged`: one line for each that could not be read; `left`: places that were not looked at, as
    only so many are sought."""

    held: tuple[Held, ...]
    damaged: tuple[str, ...]
    left: frozenset[str] = frozenset()


Marks = dict[tuple[str, str], tuple[Mark, Store]]
"""The newest mark that counts for the reader on each version, and where it is."""


class Now(Struct, frozen=True, kw_only=True):
    """What is meant by a target's name: the code that its file has now, '' where it has none of the
    user's, and where that lies."""

    code: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """Which records are looked for: what is None or '' does not matter.

    Attributes:
        model: the whole fingerprint; `id` the start of a key's.
        target: a target's name; `file` that of its file or module alone; `origins` some places
            where it may lie.
        command: as `command_part` has it.
        kin_of: a key; what may be akin to it is of its model, or of this `family`.
        query: what comes first where a store that knows its records says only the nearest; `now`
            what of a target's file comes before.
        most: so many at most, the newest; what is of the model of `kin_of` beside them.
    """

    model: str | None = None
    target: str | None = None
    file: str | None = None
    origins: frozenset[str] | None = None
    command: str | None = None
    id: str = ""
    batch: int | None = None
    kin_of: Key | None = None
    family: str = ""
    query: Query | None = None
    now: Now | None = None
    most: int | None = None

    @property
    def narrows(self) -> bool:
        """Whether it leaves any record out."""
        return bool(self.id) or any(
            one is not None
            for one in (
                self.model,
                self.target,
                self.file,
                self.origins,
                self.command,
                self.kin_of,
            )
        )

    @property
    def questions(self) -> Iterator[dict[str, Any]]:
        """As `question`, each of as many origins as one request holds."""
        origins = sorted(self.origins or ())
        for start in range(0, max(len(origins), 1), ORIGINS_AT_ONCE):
            some = frozenset(origins[start : start + ORIGINS_AT_ONCE])
            yield dataclasses.replace(self, origins=some or self.origins).question

    @property
    def question(self) -> dict[str, Any]:
        """The same as plain data, for a store that narrows."""
        asked: dict[str, Any] = {
            "model": self.model,
            "target": None if self.target is None else target_part(self.target),
            "origins": None if self.origins is None else sorted(map(target_part, self.origins)),
            "file": self.file,
            "command": self.command,
            "id": self.id or None,
            "batch": self.batch,
        }
        if self.query is not None:
            asked |= {"wanted": to_plain(self.query.stated), "near": self.query.batch}
        if self.now is not None:
            asked |= {"code": self.now.code, "origin": target_part(self.now.origin)}
        if self.kin_of is not None:
            wanted, near = to_plain(fields(self.kin_of)), self.kin_of.task.batch
            asked |= {"family": self.family, "wanted": wanted, "near": near}
        return {name: value for name, value in asked.items() if value is not None}

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
        if self.kin_of is not None and record.key.model != self.kin_of.model:
            return bool(self.family) and record.family == self.family
        return (
            self.model in (None, record.key.model)
            and self.command in (None, command_part(record.key.task.command))
            and self.target in (None, target.name)
            and self.file in (None, target.name.partition(":")[0])
            and (self.origins is None or target.origin in self.origins)
        )

    def of_places(self, places: Mapping[str, list[Name]]) -> tuple[list[list[Name]], set[str]]:
        """The versions of each record that is read, by their places, and the places of those that
        are one too many."""
        found = {place: names for place, names in places.items() if self.is_of(names[0])}
        if self.most is None or len(found) <= self.most:
            return [*found.values()], set()
        own = "" if self.kin_of is None else f"{self.kin_of.model[:12]}/"
        others = [place for place in found if not own or not place.startswith(own)]
        others.sort(key=lambda place: max(one.version.created for one in found[place]))
        left = set(others[: -self.most])
        return [names for place, names in found.items() if place not in left], left


EVERYTHING = Sought()
ORIGINS_AT_ONCE = 1000
"""A server takes no more; a script's folder may hold more Python files."""
AT_ONCE = 64
"""Records fetched from a store in one exchange."""


class Reader:
    """Whose keys tell what counts, and what else a record is held against."""

    def __init__(self, seal: Seal = UNSEALED, check: Check = nothing_wrong) -> None:
        self._seal = seal
        self._check = check

    def look_into(
        self, store: Store, sought: Sought = EVERYTHING, marks: Marks | None = None
    ) -> Listing:
        """What one store has of what is sought.

        Args:
            marks: those of the stores before it; this one's are added.

        Raises:
            StoreError: the store cannot be read.
        """
        if sought.origins == frozenset():
            texts = []
        elif sought.narrows and isinstance(store, Narrowing):
            asked = map(store.narrowed, sought.questions)
            texts = [*dict.fromkeys(itertools.chain.from_iterable(asked))]
        else:
            texts = store.keys()
        marks = {} if marks is None else marks
        self.mark(marks, store, texts)
        look = _Look(self, store, sought, marks)
        places, left = sought.of_places(self._places(texts, sought))
        orders = [ranked(names, stale_of(names, marks)) for names in places]
        for start in range(0, len(orders), AT_ONCE):
            look.take(orders[start : start + AT_ONCE])
        return Listing(
            held=tuple(one for one in look.held if sought.fits(one.record)),
            damaged=tuple(look.damaged),
            left=frozenset(left),
        )

    def _places(self, texts: Iterable[str], sought: Sought) -> dict[str, list[Name]]:
        """All versions of each record that has one of this model, target and origin."""
        model = sought.model
        start = f"{PREFIX}{model[:12]}/" if model is not None else PREFIX
        texts = [text for text in texts if text.startswith(start)]
        wanted: set[str] | None = None
        if (parts := sought.parts) is not None:  # before names are taken apart: there are many
            among = [text for text in texts if text[TARGET] in parts or text[ORIGIN] in parts]
            wanted = {name.place for text in among if (name := Name.parse(text))}
            starts = tuple({f"{PREFIX}{place[:13]}" for place in wanted})
            texts = [text for text in texts if text.startswith(starts)]
        places: dict[str, list[Name]] = {}
        for number, text in enumerate(texts):
            if not number % 256:
                check_deadline()
            name = Name.parse(text, self._seal)
            if name is not None and (wanted is None or name.place in wanted):
                places.setdefault(name.place, []).append(name)
        return places

    def mark(self, marks: Marks, store: Store, texts: Iterable[str]) -> None:
        """Add the marks among a store's keys that count, where no newer one is there."""
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
        record, signed, untagged = _sound(data, self._seal, self._check)
        if untagged != name.untagged:
            raise RecordDamaged(f"record: it is not what its name {name.text} says; refused")
        if name.trusted and not signed:
            raise RecordDamaged("record: its name is signed and it is not; refused")
        return record, signed and name.trusted


@functools.lru_cache(maxsize=64)
def _sound(data: bytes, seal: Seal, check: Check) -> tuple[Record, bool, str]:
    """The record in these bytes, whether one of the keys signed it, and the name that it bears."""
    record, signed = opened(data, seal)
    if wrong := check(record):
        raise RecordDamaged(f"record: {wrong}; refused")
    return record, signed, Name.of(record, data).untagged


class _Look:
    """One look into a store: what is found there, place by place."""

    def __init__(self, reader: Reader, store: Store, sought: Sought, marks: Marks) -> None:
        self.held: list[Held] = []
        self.damaged: list[str] = []
        self._reader, self._store, self._marks = reader, store, marks
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
        check_deadline()
        if name.text not in self._fetched:
            self._fetched.update(self._store.get_many([name.text]))
        data = self._fetched.get(name.text)
        if data is None:  # removed since it was listed
            return None
        try:
            return self._reader.opened(name, data)
        except RecordDamaged as exc:
            self.damaged.append(f"{name.record_id}: {exc}")
            return None

    def _keep(self, name: Name, names: Sequence[Name], record: Record, trusted: bool) -> None:
        """The version that counts, under each of the record's names that is looked for. What a
        target measured, a run, or two runs, is never told in another's words: each has its own
        version."""
        record, texts = self._marked(name, record)
        wanted = {one.called for one in names if self._wants(one)} | {name.called}
        for other in sorted(wanted):
            if other == name.called:
                self._add(record, name, texts, trusted)
                continue
            for alias in names:
                # What others call a record of the reader's own is not taken for granted.
                if alias.called != other or alias.trusted < name.trusted:
                    continue
                known = self._sound(alias)
                if not known or known[0].key.digest != record.key.digest:
                    continue
                if known[0].key.task.command != record.key.task.command:
                    own, own_texts = self._marked(alias, known[0])
                    self._add(own, alias, own_texts, known[1])
                else:
                    named = dataclasses.replace(record, key=known[0].key, target=known[0].target)
                    self._add(named, name, [*texts, alias.text], trusted)
                break

    def _marked(self, name: Name, record: Record) -> tuple[Record, list[str]]:
        """A version as the mark on it says, and the texts of both."""
        texts = [name.text]
        if found := self._marks.get((name.place, name.version.digest)):
            mark, store = found
            reason = self._reader.reason(mark, store)
            if reason is not None and bool(reason) == mark.stale:
                record = dataclasses.replace(record, stale=reason)
            if store is self._store:
                texts.append(mark.text)
        return record, texts

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
    return [_counting(several)[0] for several in places.values()]


def once(held: Iterable[Held]) -> dict[str, Held]:
    """Each record once, by its place: the version that counts, by its own name if that is there."""
    places: dict[str, list[Held]] = {}
    for one in held:
        places.setdefault(one.name.place, []).append(one)
    return {
        place: max(_counting(several), key=lambda one: one.under_own_name)
        for place, several in places.items()
    }


def _counting(several: Sequence[Held]) -> list[Held]:
    """The version of a record that counts, under each name that it has here."""
    stale = {one.name.text: bool(one.record.stale) for one in several}
    first = ranked([one.name for one in several], stale)[0]
    return [one for one in several if one.name.text == first.text]


def stale_of(names: Iterable[Name], marks: Marks) -> dict[str, bool]:
    """What marks say of versions, by their name's text."""
    return {
        name.text: mark[0].stale
        for name in names
        if (mark := marks.get((name.place, name.version.digest)))
    }
