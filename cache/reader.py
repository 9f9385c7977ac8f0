"""Filters for the records of a store, and the records that are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct

from advisor.cache.codec import to_plain
from advisor.cache.key import Key, fields
from advisor.cache.match import Query
from advisor.cache.name import Name, command_digest, ranked, target_key, text_digest
from advisor.cache.record import Record, Target
from advisor.cache.stores import ByteStore

ORIGINS_AT_ONCE = 1000
"""Origins that a server takes in one request; a script's folder may hold more Python files."""

T = TypeVar("T")
K = TypeVar("K")


class StoredRecord(Struct, frozen=True, kw_only=True):
    """A record, where it is, and the name of the version that counts.

    Attributes:
        texts: the keys to copy so that another store has the same: the version, and the one under
            the target's name if that is another one.
    """

    record: Record
    name: Name
    store: ByteStore
    texts: tuple[str, ...]

    @property
    def trusted(self) -> bool:
        """Whether the reader or their team measured and signed it."""
        return self.name.trusted


class Listing(Struct, frozen=True, kw_only=True):
    """The records of a store: for each record and each of its targets, the version that counts.
    `damaged`: a line for each unreadable version; `left`: keys of records that were not read."""

    held: tuple[StoredRecord, ...]
    damaged: tuple[str, ...]
    left: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Which records are looked for: None or '' matches all.

    Attributes:
        model: the whole fingerprint; `id` the start of a key's.
        target: its name; `file`: only the name of its file or module; `origins`: possible origins.
        command: as `command_digest`.
        similar_to: a key; finds records of its model, or of this `family`.
        query: lets a store that searches send only the nearest records, and prefer those of `now`,
            the target as its file is now.
        most: at most this many, the newest; records of `similar_to`'s model do not count.
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
    now: Target | None = None
    most: int | None = None

    def keys(self, store: ByteStore) -> list[str]:
        """The keys in a store that may match; all keys, if the store does not search."""
        if self.origins == frozenset():
            return []
        narrow = (self.model, self.target, self.file, self.origins, self.command, self.similar_to)
        if not store.searches or (narrow == (None,) * 6 and not self.id):
            return store.keys()
        asked, origins = self.question(), sorted(map(text_digest, self.origins or ()))
        found: dict[str, None] = {}
        for start in range(0, len(origins) or 1, ORIGINS_AT_ONCE):
            some = {"origins": origins[start : start + ORIGINS_AT_ONCE]} if origins else {}
            found |= dict.fromkeys(store.search(asked | some))
        return [*found]

    def question(self) -> dict[str, Any]:
        """The filter as plain data without its origins, for a store that searches."""
        asked = {name: getattr(self, name) for name in ("model", "file", "command", "batch")}
        asked |= {"target": self.target and text_digest(self.target), "id": self.id or None}
        if self.query is not None:
            asked |= {"wanted": to_plain(self.query.stated), "near": self.query.batch}
        if self.now is not None:
            asked |= {"code": self.now.code, "origin": text_digest(self.now.origin)}
        if self.similar_to is not None:
            wanted, near = to_plain(fields(self.similar_to)), self.similar_to.task.batch
            asked |= {"family": self.family, "wanted": wanted, "near": near}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def digests(self) -> frozenset[str] | None:
        """Digests of the target, or of the origins; a name must hold one. None: any name fits."""
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
        """The versions of each record to read, and the record keys beyond `most`."""
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


def united(held: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Merge the records of several stores: for each record and target, the version that counts."""
    several = grouped(held, lambda one: (one.name.record_key, one.record.target))
    return [_counting(versions)[0] for versions in several.values()]


def once(held: Iterable[StoredRecord]) -> dict[str, StoredRecord]:
    """Each record once, by its record key: the version that counts, under its own target's name if
    possible."""
    several = grouped(held, lambda one: one.name.record_key)
    return {
        key: max(_counting(many), key=lambda one: target_key(one.record.target) == one.name.target)
        for key, many in several.items()
    }


def _counting(several: Sequence[StoredRecord]) -> list[StoredRecord]:
    """The version of a record that counts, under each name that it has here."""
    first = ranked(one.name for one in several)[0]
    return [one for one in several if one.name.text == first.text]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    found: dict[K, list[T]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    return found
