"""Records in one or several stores: looked up in order, written to the first that takes them.

StoreError says why no store can be read or written, RecordDamaged why a record is refused.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from advisor.cache.artifacts import Artifacts
from advisor.cache.codec import decode, decode_signed, encode
from advisor.cache.key import Key
from advisor.cache.match import SimilarRecord, find_similar
from advisor.cache.name import Name, StoreKey
from advisor.cache.reader import EVERYTHING, Listing, RecordFilter, StoredRecord, once, united
from advisor.cache.record import Record
from advisor.cache.settings import max_artifacts
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.cache.stores import ByteStore, Remote, studies_of
from advisor.errors import RecordDamaged, StoreError, UsageError

T = TypeVar("T")

MAX_SIMILAR = 256  # records of other models that are read to find similar ones
_ID = re.compile(r"([0-9a-f]{1,12})(?:@([0-9]{0,10}))?")


class Records:
    """The records in some stores, which are looked up in order.

    Args:
        check: returns a fault of a record that the cache cannot see, or ''.

    Attributes:
        damaged, unreachable: a line for each record and store that the last call could not read.
        left: how many records the last `held` or `newest` did not read, because of its limit.
        stuck: a line for each version that the last `remove` could not remove.
    """

    def __init__(
        self,
        stores: ByteStore | Sequence[ByteStore],
        keyring: KeyRing = NO_KEYS,
        check: Callable[[Record], str] = lambda _record: "",
    ) -> None:
        self.stores = tuple(stores) if isinstance(stores, Sequence) else (stores,)
        self.keyring, self._check = keyring, check
        self.damaged: list[str] = []
        self.unreachable: list[str] = []
        self.stuck: list[str] = []
        self.left = 0

    @property
    def artifacts(self) -> Artifacts:
        return Artifacts(self.stores, self.keyring, max_artifacts())

    @property
    def studies(self) -> Path:
        return studies_of(self.stores)

    def is_ours(self, key: StoreKey) -> bool:
        """Whether the reader or their team wrote this key; True for a reader without any secret."""
        return key.trusted or not self.keyring.signs

    def names(self, store: ByteStore) -> list[Name]:
        """The names of all versions in a store."""
        return [name for text in store.keys() if (name := Name.parse(text, self.keyring))]

    def read(self, name: Name, data: bytes | RecordDamaged) -> Record:
        """The record in data from `get_many`. Raises RecordDamaged if it may not be used."""
        if isinstance(data, RecordDamaged):
            raise data
        record, signed, own_name = _checked(data, self.keyring, self._check)
        if not name.text.startswith(own_name):
            raise RecordDamaged(f"record: it does not match its name {name.text}; refused")
        if name.trusted and not signed:
            raise RecordDamaged("record: not signed, although its name is; refused")
        return record

    def look_into(self, store: ByteStore, wanted: RecordFilter = EVERYTHING) -> Listing:
        """The records of one store that match a filter."""
        return Listing(store, wanted, self.keyring, self.read)

    def held(self, wanted: RecordFilter = EVERYTHING) -> list[StoredRecord]:
        """The records of all stores that match a filter; for each, the version that counts."""
        self.damaged = []
        left: set[str] = set()
        found: list[StoredRecord] = []
        for _, listing in self.of_each(lambda store: self.look_into(store, wanted)):
            self.damaged += listing.damaged
            found += listing.held
            left |= listing.left
        self.left = len(left - {one.name.record_key for one in found})
        return united(found)

    def of_each(
        self, ask: Callable[[ByteStore], T], *, needs_one: bool = True
    ) -> Iterator[tuple[ByteStore, T]]:
        """Yields each store with ask(store); stores that raise StoreError are `unreachable`."""
        failed: list[StoreError] = []
        self.unreachable = []
        for store in self.stores:
            try:
                answer = ask(store)
            except StoreError as exc:
                failed.append(exc)
                self.unreachable.append(str(exc))
            else:
                yield store, answer
        if needs_one and failed and len(failed) == len(self.stores):
            raise failed[0]

    def all(self, wanted: RecordFilter = EVERYTHING) -> list[Record]:
        """All matching records that can be read, each once."""
        return [one.record for one in once(self.held(wanted))]

    def newest(self, most: int) -> list[StoredRecord]:
        """The `most` newest records of each store, each once, newest first; older are not read."""
        found = once(self.held(RecordFilter(most=most)))
        return sorted(found, key=lambda one: -one.record.provenance.created)

    def similar(self, key: Key, family: str) -> list[SimilarRecord]:
        """Records of a key's model and family, the nearest first."""
        wanted = RecordFilter(similar_to=key, family=family, most=MAX_SIMILAR)
        return find_similar(key, [one.record for one in self.held(wanted)])

    def one(self, id_prefix: str) -> StoredRecord:
        """The only record whose id starts with a text: 'abc', 'ae1bff61eea5', 'ae1bff61eea5@64'."""
        key, batch = _id(id_prefix)
        found = once(self.held(RecordFilter(id=key, batch=batch)))
        ids = {one.name.record_id for one in found}
        _check_one({*ids, *(line.partition(":")[0] for line in self.damaged)}, id_prefix)
        if not found:
            raise RecordDamaged("; ".join(self.damaged))
        return found[0]

    def named(self, id_prefix: str) -> list[tuple[ByteStore, Name]]:
        """The `versions` of the one record that a text names as in `one`."""
        found = self.versions(*_id(id_prefix))
        _check_one({name.record_id for _store, name in found}, id_prefix)
        return found

    def versions(self, id: str = "", batch: int | None = None) -> list[tuple[ByteStore, Name]]:
        """Every version, readable or not, of the records whose key's id begins with `id`, at this
        batch or any; in all stores that can be read."""
        return [
            (store, name)
            for store, names in self.of_each(self.names, needs_one=False)
            for name in names
            if name.id.startswith(id) and batch in (None, name.batch)
        ]

    def put(self, record: Record, *, revises: Record | None = None) -> ByteStore:
        """Write a record to the first store that takes it. Returns this store.

        A signature says that its owner measured the record. So a revision, or the same record under
        another target's name, is signed only if the reader's keys signed what it `revises`.
        """
        self.keyring = self.keyring.ready()
        keyring = self.keyring if revises is None or self._signed(revises) else NO_KEYS
        data = encode(record, keyring)
        text = Name.of(decode(data), data, keyring).text
        return next(store for store, _ in self.of_each(lambda store: store.put(text, data)))

    def _signed(self, record: Record) -> bool:
        """Whether a record is in the stores and the reader's keys signed it."""
        same = RecordFilter(model=record.key.model, id=record.key.id, batch=record.batch)
        with contextlib.suppress(StoreError):
            return any(one.trusted and one.record == record for one in self.held(same))
        return False

    def health(self, store: ByteStore) -> str:
        """A store's own health, how many records it has, and how many of them are unreadable."""
        health = store.health()
        try:
            if not health.startswith("ok"):
                return health
            listing = self.look_into(store, RecordFilter(most=MAX_SIMILAR))
        except StoreError as exc:
            return f"unusable: {exc}"
        number = len(once(listing.held)) + len(listing.left)
        among = f" of the newest {MAX_SIMILAR}" if listing.left else ""
        bad = f", {len(listing.damaged)}{among} unreadable" if listing.damaged else ""
        return f"{health}: {number} record{'s' * (number != 1)}{bad}"

    @staticmethod
    def copy(one: StoredRecord, store: ByteStore) -> None:
        """Put a record into another store that does not have it."""
        there = store.get_many(one.texts)
        for text, data in one.store.get_many(one.texts).items():
            if isinstance(data, bytes) and there.get(text) != data:
                store.put(text, data)

    def keep(self, one: StoredRecord) -> None:
        """Copy a record into the first local store that takes it."""
        for store in self.stores:
            if not isinstance(store, Remote):
                with contextlib.suppress(StoreError):
                    return self.copy(one, store)

    def first_writable(self) -> ByteStore:
        return next(store for store, _ in self.of_each(lambda store: store.check_writable()))

    def remove(self, going: Iterable[tuple[ByteStore, StoreKey]]) -> list[StoreKey]:
        """Remove these keys of stores. Returns those that were there and are gone."""
        gone: list[StoreKey] = []
        self.stuck = []
        for store, one in going:
            try:
                gone += [one] * store.delete(one.text)
            except StoreError as exc:
                self.stuck.append(f"{one.record_id}: {exc}")
        return gone


@functools.lru_cache(maxsize=64)
def _checked(
    data: bytes, keyring: KeyRing, check: Callable[[Record], str]
) -> tuple[Record, bool, str]:
    """The record in these bytes, whether one of the keys signed it, and its name."""
    record, signed = decode_signed(data, keyring)
    if wrong := check(record):
        raise RecordDamaged(f"record: {wrong}; refused")
    return record, signed, Name.of(record, data).text


def _id(text: str) -> tuple[str, int | None]:
    found = _ID.fullmatch(text)
    if not found:
        raise UsageError(f"key {text[:80]!r}: expected e.g. ae1bff61eea5@64; run: advisor show")
    return found[1], int(found[2]) if found[2] else None


def _check_one(ids: set[str], text: str) -> None:
    if not ids:
        raise UsageError(f"key {text!r}: no such record; run: advisor show")
    if len(ids) > 1:
        raise UsageError(
            f"key {text!r}: several records match: {', '.join(sorted(ids))}; give a longer key"
        )
