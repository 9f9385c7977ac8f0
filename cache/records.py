"""Records in one or several stores: looked up in order, written to the first that takes them.

StoreError says why no store can be read or written, RecordDamaged why a record is invalid.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from advisor.cache.artifacts import Artifacts
from advisor.cache.codec import decode, encode
from advisor.cache.key import Key
from advisor.cache.match import SimilarRecord, find_similar
from advisor.cache.name import Name, StoreKey, record_id, record_key
from advisor.cache.reader import (
    EVERYTHING,
    Check,
    Reader,
    RecordFilter,
    StoredRecord,
    nothing_wrong,
    once,
    united,
)
from advisor.cache.record import Record
from advisor.cache.settings import max_artifacts
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.cache.stores import Remote, Store, studies_of
from advisor.cache.stores.filesystem import beside
from advisor.errors import RecordDamaged, StoreError, UsageError

T = TypeVar("T")

MAX_SIMILAR = 256
"""Records of other models that are read from a store to see whether they are similar."""
_ID = re.compile(r"([0-9a-f]{1,12})(?:@([0-9]{0,10}))?")


class Records(Reader):
    """The records in some stores, which are looked up in order.

    Attributes:
        damaged: one line for each record that the last `all`, `held` or `get` could not read.
        unreachable: one line for each store that they could not read.
        left: how many records the last `held` or `newest` did not look at, as there are more.
        stuck: one line for each version that the last `remove` could not.
    """

    def __init__(
        self,
        stores: Store | Sequence[Store],
        *,
        keyring: KeyRing = NO_KEYS,
        check: Check = nothing_wrong,
    ) -> None:
        super().__init__(keyring, check)
        self.stores = tuple(stores) if isinstance(stores, Sequence) else (stores,)
        self.damaged: list[str] = []
        self.unreachable: list[str] = []
        self.stuck: list[str] = []
        self.left = 0

    @property
    def artifacts(self) -> Artifacts:
        """What was compiled for their configs."""
        return Artifacts(self.stores, self.keyring, max_artifacts())

    @property
    def studies(self) -> Path:
        """The folder for studies."""
        return studies_of(self.stores)

    def study(self, name: str) -> Path:
        """The file of a study, 'NAME.journal' or 'NAME.lock', inside that folder."""
        return beside(self.studies, name)

    def held(self, wanted: RecordFilter = EVERYTHING) -> list[StoredRecord]:
        """What all stores have; of the same record in several, the version that counts."""
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
        self, ask: Callable[[Store], T], *, needs_one: bool = True
    ) -> Iterator[tuple[Store, T]]:
        """What ask(store) returns for each store; those that raise StoreError are `unreachable`."""
        self.unreachable = []
        failed: list[StoreError] = []
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
        """What can be read, each record once."""
        return [one.record for one in once(self.held(wanted)).values()]

    def newest(self, most: int) -> list[StoredRecord]:
        """The newest of each store, once each, the newest first; older ones are not read."""
        found = once(self.held(RecordFilter(most=most))).values()
        return sorted(found, key=lambda one: -one.record.provenance.created)

    def similar(self, key: Key, family: str) -> list[SimilarRecord]:
        """Records whose advice is worth trying first for a key, the nearest first: of its model,
        and the nearest or newest of its family."""
        wanted = RecordFilter(similar_to=key, family=family, most=MAX_SIMILAR)
        return find_similar(key, family, [one.record for one in self.held(wanted)])

    def get(self, id_prefix: str) -> Record:
        """As `one`, without where it is."""
        return self.one(id_prefix).record

    def one(self, id_prefix: str) -> StoredRecord:
        """The one record that 'abc', 'ae1bff61eea5' or 'ae1bff61eea5@64' names."""
        key, batch = _id(id_prefix)
        found = once(self.held(RecordFilter(id=key, batch=batch)))
        ids = {record_id(record_key) for record_key in found}
        _check_one({*ids, *(line.partition(":")[0] for line in self.damaged)}, id_prefix)
        if not found:
            raise RecordDamaged("; ".join(self.damaged))
        return next(iter(found.values()))

    def named(self, id_prefix: str | None = None) -> list[tuple[Store, Name]]:
        """Every version, readable or not, of the one record that a text names as for `get`; of all
        records for None. `unreachable`: stores that were not listed.
        """
        start, batch = ("", None) if id_prefix is None else _id(id_prefix)
        found: list[tuple[Store, Name]] = []
        for store, texts in self.of_each(lambda store: store.keys(), needs_one=False):
            for name in filter(None, map(Name.parse, texts)):
                if name.id.startswith(start) and batch in (None, name.batch):
                    found.append((store, name))
        if id_prefix is not None:
            _check_one({name.record_id for _store, name in found}, id_prefix)
        return found

    def put(self, record: Record, *, revises: Record | None = None) -> Store:
        """Keep it in the first store that can be written; returns that store.

        A signature says that its owner measured what is in a record. So a revision is signed only
        if the reader's keys signed what it revises.

        Args:
            revises: what it was made of. The same record under another target's name is a revision
                too.
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

    def health(self, store: Store) -> str:
        """A store's own health, how many records it has, and how many of them are unreadable."""
        health = store.health()
        if not health.startswith("ok"):
            return health
        try:
            listing = self.look_into(store, RecordFilter(most=MAX_SIMILAR))
        except StoreError as exc:
            return f"unusable: {exc}"
        number = len(once(listing.held)) + len(listing.left)
        count = f"{number} record{'s' * (number != 1)}"
        among = f" of the newest {MAX_SIMILAR}" if listing.left else ""
        bad = f", {len(listing.damaged)}{among} unreadable" if listing.damaged else ""
        return f"{health}: {count}{bad}"

    @staticmethod
    def copy(one: StoredRecord, store: Store) -> None:
        """Put a record into another store that does not have it."""
        there = store.get_many(one.texts)
        for text, data in one.store.get_many(one.texts).items():
            if isinstance(data, bytes) and there.get(text) != data:
                store.put(text, data)

    def keep(self, one: StoredRecord) -> None:
        """Copy a record into the first local store that takes it."""
        if local := [store for store in self.stores if not isinstance(store, Remote)]:
            self.copy(one, _first_writable(local))

    def first_writable(self) -> Store:
        """The first store that can be written."""
        return _first_writable(self.stores)

    def versions(self, record: Record) -> list[tuple[Store, Name]]:
        """Every version of a record in every store that can be read; `unreachable`: the others."""
        key = record_key(record)
        listed = self.of_each(self.names, needs_one=False)
        return [
            (store, name) for store, names in listed for name in names if name.record_key == key
        ]

    def remove(self, versions: Iterable[tuple[Store, StoreKey]]) -> int:
        """Remove exactly these; how many there were. `stuck` has a line for each that stays."""
        count = 0
        self.stuck = []
        for store, key in versions:
            try:
                count += store.delete(key.text)
            except StoreError as exc:
                self.stuck.append(f"{key.record_id}: {exc}")
        return count


def _id(text: str) -> tuple[str, int | None]:
    found = _ID.fullmatch(text)
    if not found:
        raise UsageError(f"key {text[:80]!r}: expected one as ae1bff61eea5@64; run: advisor show")
    return found[1], int(found[2]) if found[2] else None


def _check_one(ids: set[str], text: str) -> None:
    if not ids:
        raise UsageError(f"key {text!r}: no such record; run: advisor show")
    if len(ids) > 1:
        raise UsageError(f"key {text!r}: several begin so: {', '.join(sorted(ids))}; give more")


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
