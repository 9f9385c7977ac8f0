"""Filters for the records of a store, and the records that are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from advisor.cache.codec import to_plain
from advisor.cache.key import Key, fields
from advisor.cache.match import Query
from advisor.cache.name import PREFIX, Name, command_digest, ranked, target_key, text_digest
from advisor.cache.record import Record, Target
from advisor.cache.signing import KeyRing
from advisor.cache.stores import ByteStore
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import RecordDamaged

AT_ONCE = 64  # records that are fetched in one request

Read = Callable[[Name, "bytes | RecordDamaged"], Record]
T = TypeVar("T")
K = TypeVar("K")


class StoredRecord(Struct, frozen=True, kw_only=True):
    """A record, where it is, and the name of the version that counts. `texts`: the keys to copy so
    that another store has the same: this version, and the one under the target's name."""

    record: Record
    name: Name
    store: ByteStore
    texts: tuple[str, ...]

    @property
    def trusted(self) -> bool:
        """Whether the reader or their team measured and signed it."""
        return self.name.trusted


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Which records are looked for: None or '' matches all.

    Attributes:
        model: the whole fingerprint; `id` the start of a key's.
        target: its name; `file`: only the name of its file or module.
        command: as `command_digest`.
        similar_to: a key; finds records of its model, or of this `family`.
        query, now: what a store that searches sorts by; `now` is the target as its file is now.
        most: at most this many, the newest; records of `similar_to`'s model do not count.
    """

    model: str | None = None
    target: str | None = None
    file: str | None = None
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
        narrow = (self.model, self.target, self.file, self.command, self.similar_to)
        narrowed = self.id or any(one is not None for one in narrow)
        return store.search(self.question()) if store.searches and narrowed else store.keys()

    def question(self) -> dict[str, Any]:
        """The filter as plain data, for a store that searches."""
        asked = {name: getattr(self, name) for name in ("model", "file", "command", "batch")}
        asked |= {"target": self.digest, "id": self.id or None}
        if self.query is not None:
            asked |= {"wanted": to_plain(self.query.stated), "near": self.query.batch}
        if self.now is not None:
            asked |= {"code": self.now.code, "origin": text_digest(self.now.origin)}
        if self.similar_to is not None:
            wanted, near = to_plain(fields(self.similar_to)), self.similar_to.task.batch
            asked |= {"family": self.family, "wanted": wanted, "near": near}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def digest(self) -> str | None:
        """The digest of the target's name; None for any target."""
        return self.target and text_digest(self.target)

    def matches(self, record: Record) -> bool:
        """Whether a record is of this model and target."""
        name = record.target.name
        if self.similar_to is not None and record.key.model != self.similar_to.model:
            return bool(self.family) and record.family == self.family
        return (
            self.model in (None, record.key.model)
            and self.command in (None, command_digest(record.key.task.command))
            and self.target in (None, name)
            and self.file in (None, name.partition(":")[0])
        )

    def versions(self, store: ByteStore, keyring: KeyRing) -> tuple[list[list[Name]], set[str]]:
        """The names of all versions of each record in a store to read, if one of the versions is of
        the wanted target; and the keys of the records beyond `most`."""
        start, digest = PREFIX + (self.model or "")[:12], self.digest
        texts = [text for text in self.keys(store) if text.startswith(start)]
        if digest is not None:  # not parsed yet, as there may be thousands
            models = tuple({one[:20] for one in texts if one[20:32] == digest})
            texts = [text for text in texts if text.startswith(models)]
        names: list[Name] = []
        for text in texts:
            check_deadline()
            names += filter(None, [Name.parse(text, keyring)])
        found = {
            key: several
            for key, several in grouped(names, lambda name: name.record_key).items()
            if several[0].id.startswith(self.id)
            and self.batch in (None, several[0].batch)
            and (digest is None or any(digest == name.target[0] for name in several))
        }
        left: set[str] = set()
        if self.most is not None and len(found) > self.most:
            own = "" if self.similar_to is None else f"{self.similar_to.model[:12]}/"
            others = [key for key in found if not own or not key.startswith(own)]
            others.sort(key=lambda key: max(name.created for name in found[key]))
            left = set(others[: -self.most])
        return [names for key, names in found.items() if key not in left], left


EVERYTHING = RecordFilter()


class Listing:
    """The records of a store: for each record and each of its targets, the version that counts.
    `damaged`: a line for each unreadable version; `left`: keys of records that were not read."""

    def __init__(
        self, store: ByteStore, wanted: RecordFilter, keyring: KeyRing, read: Read
    ) -> None:
        self.held: list[StoredRecord] = []
        self.damaged: list[str] = []
        self._store, self._read, self._digest = store, read, wanted.digest
        versions, self.left = wanted.versions(store, keyring)
        for start in range(0, len(versions), AT_ONCE):
            orders = list(map(ranked, versions[start : start + AT_ONCE]))
            first = [names[0].text for names in orders]
            self._fetched = {**dict.fromkeys(first), **store.get_many(first)}
            for names in orders:
                self.held += (one for one in self._of(names) if wanted.matches(one.record))

    def _of(self, names: Sequence[Name]) -> Iterator[StoredRecord]:
        """Yields the version of a record that counts, under each target's name that is wanted. A
        later version is fetched if those before are damaged.

        Measurements of a target and a run, or of two runs, are separate: each has its version.
        """
        one = next(filter(None, map(self._get, names)), None)
        if one is None:
            return
        yield one
        digest, wanted = one.record.key.digest, self._digest
        targets = {name.target for name in names if wanted in (None, name.target[0])}
        for target in sorted(targets - {one.name.target}):
            # Names that others give to a record of the reader's own do not count.
            fit = [n for n in names if n.target == target and n.trusted >= one.name.trusted]
            same = (n for n in map(self._get, fit) if n and n.record.key.digest == digest)
            if (alias := next(same, None)) is None:
                continue
            key = alias.record.key
            if key.task.command == one.record.key.task.command:
                named = dataclasses.replace(one.record, key=key, target=alias.record.target)
                alias = replace(one, record=named, texts=(one.name.text, alias.name.text))
            yield alias

    def _get(self, name: Name) -> StoredRecord | None:
        check_deadline()
        if name.text not in self._fetched:
            self._fetched.update(self._store.get_many([name.text]))
        if (data := self._fetched.get(name.text)) is None:  # removed since it was listed
            return None
        try:
            record = self._read(name, data)
        except RecordDamaged as exc:
            self.damaged.append(f"{name.record_id}: {exc}")
            return None
        return StoredRecord(record=record, name=name, store=self._store, texts=(name.text,))


def united(held: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Merge the records of several stores: for each record and target, the version that counts."""
    return _counting(grouped(held, lambda one: (one.name.record_key, one.record.target)))


def once(held: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Each record once: the version that counts, under its own target's name if possible."""
    return _counting(grouped(held, lambda one: one.name.record_key))


def _counting(groups: Mapping[Any, Sequence[StoredRecord]]) -> list[StoredRecord]:
    found = []
    for several in groups.values():
        first = ranked(one.name for one in several)[0]
        same = (one for one in several if one.name.text == first.text)
        found.append(max(same, key=lambda one: target_key(one.record.target) == one.name.target))
    return found


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    found: dict[K, list[T]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    return found
