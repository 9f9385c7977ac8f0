"""Read one store: for each record, the version that counts for the reader.

Names tell which version that is (see `name`). Only that one is fetched, and the next one only if it
is damaged. StoreError says why the store cannot be read, RecordDamaged why a record is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct

from advisor.cache.codec import decode_signed, to_plain
from advisor.cache.key import Key, fields
from advisor.cache.match import Query
from advisor.cache.name import (
    ORIGIN,
    PREFIX,
    TARGET,
    Name,
    StoreKey,
    command_digest,
    ranked,
    target_key,
    text_digest,
)
from advisor.cache.record import Record
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.cache.stores import Narrowing, Store
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import RecordDamaged

Check = Callable[[Record], str]
"""Returns what is wrong with a record that the cache cannot know, as a knob's domain; or ''."""
ORIGINS_AT_ONCE = 1000
"""A server takes no more; a script's folder may hold more Python files."""
AT_ONCE = 64
"""Records fetched from a store in one request."""

T = TypeVar("T")
K = TypeVar("K")


def nothing_wrong(_record: Record) -> str:
    return ""


class StoredRecord(Struct, frozen=True, kw_only=True):
    """A record and where it is.

    Attributes:
        name: of the version that counts.
        texts: the keys to copy so that another store has the same: the version, and the one under
            the target's name if that is another one.
        trusted: the reader or their team measured and signed it.
    """

    record: Record
    name: Name
    store: Store
    texts: tuple[str, ...]
    trusted: bool


class Listing(Struct, frozen=True, kw_only=True):
    """What a store holds: the version that counts, for each record and each of its targets.

    Attributes:
        damaged: one line for each version that could not be read.
        left: keys of records beyond the number that was asked for; they were not read.
    """

    held: tuple[StoredRecord, ...]
    damaged: tuple[str, ...]
    left: frozenset[str] = frozenset()


class CurrentFile(Struct, frozen=True, kw_only=True):
    """The code of a target's file now, '' if the user has no such file, and its `origin`."""

    code: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Which records are looked for: None or '' matches all.

    Attributes:
        model: the whole fingerprint; `id` the start of a key's.
        target: a target's name; `file` that of its file or module alone; `origins` where it may
            lie.
        command: as `command_digest`.
        similar_to: a key; finds records of its model, or of this `family`.
        query: a store that searches sends only the nearest to it; `now` is what it prefers of a
            target's file.
        most: so many at most, the newest, besides those of the model of `similar_to`.
    """

    model: str | None = None
    target: str | None = None
    file: str | None = None
    origins: frozenset[str] | None = None
    command: str | None = None
    id: str = ""
    batch: int | None = None
    similar_to: Key | None = None
    family: str = ""
    query: Query | None = None
    now: CurrentFile | None = None
    most: int | None = None

    @property
    def is_narrow(self) -> bool:
        """Whether a store that searches can leave out any record."""
        found = (self.model, self.target, self.file, self.origins, self.command, self.similar_to)
        return bool(self.id) or found != (None,) * 6

    def questions(self) -> Iterator[dict[str, Any]]:
        """As plain data, for a store that searches: one for so many origins as it takes."""
        asked: dict[str, Any] = {
            "model": self.model,
            "target": None if self.target is None else text_digest(self.target),
            "file": self.file,
            "command": self.command,
            "id": self.id or None,
            "batch": self.batch,
        }
        if self.query is not None:
            asked |= {"wanted": to_plain(self.query.stated), "near": self.query.batch}
        if self.now is not None:
            asked |= {"code": self.now.code, "origin": text_digest(self.now.origin)}
        if self.similar_to is not None:
            wanted, near = to_plain(fields(self.similar_to)), self.similar_to.task.batch
            asked |= {"family": self.family, "wanted": wanted, "near": near}
        asked = {name: value for name, value in asked.items() if value is not None}
        if self.origins is None:
            yield asked
            return
        origins = sorted(map(text_digest, self.origins))
        for start in range(0, len(origins), ORIGINS_AT_ONCE):
            yield asked | {"origins": origins[start : start + ORIGINS_AT_ONCE]}

    @property
    def digests(self) -> frozenset[str] | None:
        """Of the target, or of the origins: names hold one of them. None if any name will do."""
        if self.target is not None:
            return frozenset((text_digest(self.target),))
        return None if self.origins is None else frozenset(map(text_digest, self.origins))

    def matches(self, record: Record) -> bool:
        """Whether a record is of this model, target and origin."""
        target = record.target
        if self.similar_to is not None and record.key.model != self.similar_to.model:
            return bool(self.family) and record.family == self.family
        return (
            self.model in (None, record.key.model)
            and self.command in (None, command_digest(record.key.task.command))
            and self.target in (None, target.name)
            and self.file in (None, target.name.partition(":")[0])
            and (self.origins is None or target.origin in self.origins)
        )

    def limited(self, versions: Mapping[str, list[Name]]) -> tuple[list[list[Name]], set[str]]:
        """The versions of each record that is read, and the record keys of those that are one too
        many."""
        found = {
            key: names
            for key, names in versions.items()
            if names[0].id.startswith(self.id) and self.batch in (None, names[0].batch)
        }
        left: set[str] = set()
        if self.most is not None and len(found) > self.most:
            own = "" if self.similar_to is None else f"{self.similar_to.model[:12]}/"
            others = [key for key in found if not own or not key.startswith(own)]
            others.sort(key=lambda key: max(name.created for name in found[key]))
            left = set(others[: -self.most])
        return [names for key, names in found.items() if key not in left], left


EVERYTHING = RecordFilter()


class Reader:
    """Reads stores with the keys that tell what counts, and a check of each record."""

    def __init__(self, keyring: KeyRing = NO_KEYS, check: Check = nothing_wrong) -> None:
        self.keyring = keyring
        self._check = check

    def look_into(self, store: Store, wanted: RecordFilter = EVERYTHING) -> Listing:
        """What one store has of what is wanted."""
        if wanted.is_narrow and isinstance(store, Narrowing):
            asked = map(store.narrowed, wanted.questions())
            texts = [*dict.fromkeys(itertools.chain.from_iterable(asked))]
        else:
            texts = [] if wanted.origins == frozenset() else store.keys()
        look = _Look(self, store, wanted.digests)
        versions, left = wanted.limited(self._versions(texts, wanted))
        orders = list(map(ranked, versions))
        for start in range(0, len(orders), AT_ONCE):
            look.take(orders[start : start + AT_ONCE])
        return Listing(
            held=tuple(one for one in look.held if wanted.matches(one.record)),
            damaged=tuple(look.damaged),
            left=frozenset(left),
        )

    def _versions(self, texts: Iterable[str], wanted: RecordFilter) -> dict[str, list[Name]]:
        """All versions of each record of which one is of this model, target and origin."""
        start = PREFIX if wanted.model is None else f"{PREFIX}{wanted.model[:12]}/"
        texts = [text for text in texts if text.startswith(start)]
        keys: set[str] | None = None
        if (digests := wanted.digests) is not None:  # before names are parsed: there are many
            some = [one for one in texts if one[TARGET] in digests or one[ORIGIN] in digests]
            keys = {name.record_key for text in some if (name := Name.parse(text))}
            starts = tuple({f"{PREFIX}{key[:13]}" for key in keys})
            texts = [text for text in texts if text.startswith(starts)]
        found: list[Name] = []
        for number, text in enumerate(texts):
            if not number % 256:
                check_deadline()
            name = Name.parse(text, self.keyring)
            if name is not None and (keys is None or name.record_key in keys):
                found.append(name)
        return grouped(found, lambda name: name.record_key)

    def is_ours(self, key: StoreKey) -> bool:
        """Whether the reader or their team wrote it; for a reader without any key, all are."""
        return key.trusted or not self.keyring.signs

    def names(self, store: Store) -> list[Name]:
        """The names of the records in a store, versions that no longer count included."""
        return [name for text in store.keys() if (name := Name.parse(text, self.keyring))]

    def read(self, name: Name, data: bytes | RecordDamaged) -> tuple[Record, bool]:
        """The record in what `get_many` gave, if it may be used and is what its name says, and
        whether one of the reader's keys signed it."""
        if isinstance(data, RecordDamaged):
            raise data
        record, signed, own_name = _checked(data, self.keyring, self._check)
        if own_name != name.untagged:
            raise RecordDamaged(f"record: it is not what its name {name.text} says; refused")
        if name.trusted and not signed:
            raise RecordDamaged("record: its name is signed and it is not; refused")
        return record, signed and name.trusted


@functools.lru_cache(maxsize=64)
def _checked(data: bytes, keyring: KeyRing, check: Check) -> tuple[Record, bool, str]:
    """The record in these bytes, whether one of the keys signed it, and its name."""
    record, signed = decode_signed(data, keyring)
    if wrong := check(record):
        raise RecordDamaged(f"record: {wrong}; refused")
    return record, signed, Name.of(record, data).text


class _Look:
    """One look into a store. `digests`: as `RecordFilter.digests`."""

    def __init__(self, reader: Reader, store: Store, digests: frozenset[str] | None) -> None:
        self.held: list[StoredRecord] = []
        self.damaged: list[str] = []
        self._reader, self._store, self._digests = reader, store, digests
        self._fetched: dict[str, bytes | RecordDamaged | None] = {}

    def take(self, orders: Sequence[Sequence[Name]]) -> None:
        """Add the version that counts of each record, whose versions are given in their order.

        The first of each comes in one request for all; another is fetched if it is damaged.
        """
        first = [names[0].text for names in orders]
        self._fetched = {**dict.fromkeys(first), **self._store.get_many(first)}
        for names in orders:
            for name in names:
                if found := self._read(name):
                    self._add_all(name, names, *found)
                    break

    def _read(self, name: Name) -> tuple[Record, bool] | None:
        check_deadline()
        if name.text not in self._fetched:
            self._fetched.update(self._store.get_many([name.text]))
        data = self._fetched.get(name.text)
        if data is None:  # removed since it was listed
            return None
        try:
            return self._reader.read(name, data)
        except RecordDamaged as exc:
            self.damaged.append(f"{name.record_id}: {exc}")
            return None

    def _add_all(self, name: Name, names: Sequence[Name], record: Record, trusted: bool) -> None:
        """Add the version that counts under each target's name that is looked for.

        What a target and a run measured, or two runs, are not one: each has its own version.
        """
        digests = self._digests
        wanted = {one.target for one in names if digests is None or digests & {*one.target}}
        self._add(name, record, trusted)
        for target in sorted(wanted - {name.target}):
            for alias in names:
                # Names that others give to a record of the reader's own do not count.
                if alias.target != target or alias.trusted < name.trusted:
                    continue
                known = self._read(alias)
                if not known or known[0].key.digest != record.key.digest:
                    continue
                if known[0].key.task.command != record.key.task.command:
                    self._add(alias, *known)
                else:
                    named = dataclasses.replace(record, key=known[0].key, target=known[0].target)
                    self._add(name, named, trusted, alias.text)
                break

    def _add(self, name: Name, record: Record, trusted: bool, *texts: str) -> None:
        self.held.append(
            StoredRecord(
                record=record,
                name=name,
                store=self._store,
                texts=(name.text, *texts),
                trusted=trusted,
            )
        )


def united(held: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Merges several stores: the version that counts, for each record and target."""
    several = grouped(held, lambda one: (one.name.record_key, one.record.target))
    return [_counting(versions)[0] for versions in several.values()]


def once(held: Iterable[StoredRecord]) -> dict[str, StoredRecord]:
    """Each record once, by its record key: the version that counts, under its own name if
    possible."""

    def under_own_name(one: StoredRecord) -> bool:
        return target_key(one.record.target) == one.name.target

    several = grouped(held, lambda one: one.name.record_key)
    return {key: max(_counting(versions), key=under_own_name) for key, versions in several.items()}


def _counting(several: Sequence[StoredRecord]) -> list[StoredRecord]:
    """The version of a record that counts, under each name that it has here."""
    first = ranked(one.name for one in several)[0]
    return [one for one in several if one.name.text == first.text]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, in their order."""
    found: dict[K, list[T]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    return found
