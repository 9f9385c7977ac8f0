"""Records in one or several stores: looked up in order, written to the first that takes them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from advisor.cache.artifacts import Artifacts, Label, place_of
from advisor.cache.codec import encode, opened, reason_of
from advisor.cache.key import Key
from advisor.cache.match import SimilarRecord, find_similar
from advisor.cache.name import Mark, Name
from advisor.cache.reader import (
    EVERYTHING,
    Check,
    Held,
    Marks,
    Reader,
    Sought,
    nothing_wrong,
    once,
    united,
)
from advisor.cache.record import Record
from advisor.cache.seal import UNSEALED, Seal
from advisor.cache.settings import max_artifacts
from advisor.cache.stores import Remote, Store, studies_of
from advisor.cache.stores.filesystem import beside
from advisor.errors import RecordDamaged, StoreError, UsageError

T = TypeVar("T")

MOST_STRANGERS = 256
"""Records of other models that are read from a store to see whether they are akin."""
_ID = re.compile(r"([0-9a-f]{1,12})(?:@([0-9]{0,10}))?")


class Records(Reader):
    """The records in some stores, which are looked up in order.

    Attributes:
        stores: where they are.
        damaged: one line for each record that the last `all`, `held` or `get` could not read.
        unreachable: one line for each store that they could not read.
        left: how many records the last `held` or `newest` did not look at, as there are more.
        stuck: one line for each version that the last `remove` could not.
    """

    def __init__(
        self,
        stores: Store | Sequence[Store],
        *,
        seal: Seal = UNSEALED,
        check: Check = nothing_wrong,
    ) -> None:
        super().__init__(seal, check)
        self.stores = tuple(stores) if isinstance(stores, Sequence) else (stores,)
        self.damaged: list[str] = []
        self.unreachable: list[str] = []
        self.stuck: list[str] = []
        self.left = 0

    @property
    def artifacts(self) -> Artifacts:
        """What was compiled for their configs.

        Raises:
            UsageError: $ADVISOR_MAX_ARTIFACTS is no size.
        """
        return Artifacts(self.stores, self._seal, max_artifacts())

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

    def held(self, sought: Sought = EVERYTHING) -> list[Held]:
        """What all stores have; of the same record in several, the version that counts.

        Raises:
            StoreError: no store can be read.
        """
        self.damaged = []
        left: set[str] = set()
        found: list[Held] = []
        marks: Marks = {}
        for _store, listing in self.of_each(lambda store: self.look_into(store, sought, marks)):
            self.damaged += listing.damaged
            found += listing.held
            left |= listing.left
        self.left = len(left - {one.name.place for one in found})
        return united(found)

    def of_each(
        self, ask: Callable[[Store], T], *, needs_one: bool = True
    ) -> Iterator[tuple[Store, T]]:
        """What ask(store) returns for each store that can be asked; the others are `unreachable`.

        Raises:
            StoreError: none can be asked, and one is needed; what the first one says.
        """
        self.unreachable = []
        failed: list[StoreError] = []
        for store in self.stores:
            try:
                said = ask(store)
            except StoreError as exc:
                failed.append(exc)
                self.unreachable.append(str(exc))
            else:
                yield store, said
        if needs_one and failed and len(failed) == len(self.stores):
            raise failed[0]

    def all(self, sought: Sought = EVERYTHING) -> list[Record]:
        """What can be read, each record once, under the target's name of what counts."""
        return [one.record for one in once(self.held(sought)).values()]

    def under_each_name(self, sought: Sought) -> list[Record]:
        """The same, once for each name that it is known by."""
        return [one.record for one in self.held(sought)]

    def newest(self, most: int) -> list[Held]:
        """The newest of each store, once each, the newest first; what is older is not read."""
        found = once(self.held(Sought(most=most))).values()
        return sorted(found, key=lambda one: -one.record.provenance.created)

    def akin(self, key: Key, family: str) -> list[SimilarRecord]:
        """Records whose advice is worth trying first for a key, the nearest first.

        Those of its model, and of its family a store that knows its records says the nearest, any
        other those that are among its newest records.
        """
        sought = Sought(kin_of=key, family=family, most=MOST_STRANGERS)
        return find_similar(key, family, self.under_each_name(sought))

    def get(self, id_prefix: str) -> Record:
        """As `one`, without where it is."""
        return self.one(id_prefix).record

    def one(self, id_prefix: str) -> Held:
        """The one record that 'abc', 'ae1bff61eea5' or 'ae1bff61eea5@64' names.

        Raises:
            UsageError: none does, or several do. RecordDamaged: it cannot be read.
        """
        key, batch = _id(id_prefix)
        found = once(self.held(Sought(id=key, batch=batch)))
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
        found: list[tuple[Store, Name | Mark]] = []
        for store, texts in self.of_each(lambda store: store.keys(), needs_one=False):
            for text in texts:
                one = self.parse(text) or Mark.parse(text, self._seal)
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

    def _put(self, text: str, data: bytes) -> Store:
        """Keep data in the first store that takes it, which is returned."""
        return next(store for store, _ in self.of_each(lambda store: store.put(text, data)))

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
            listing = self.look_into(store, Sought(most=MOST_STRANGERS))
        except StoreError as exc:
            return f"unusable: {exc}"
        number = len(once(listing.held)) + len(listing.left)
        count = f"{number} record{'s' * (number != 1)}"
        among = f" of the newest {MOST_STRANGERS}" if listing.left else ""
        bad = f", {len(listing.damaged)}{among} unreadable" if listing.damaged else ""
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
        place = place_of(record)
        listed = self.of_each(self.names, needs_one=False)
        return [(store, name) for store, names in listed for name in names if name.place == place]

    def remove(self, versions: Iterable[tuple[Store, Name | Mark | Label]]) -> int:
        """Remove exactly these; how many were there. `stuck` has a line for each that stays."""
        count = 0
        self.stuck = []
        for store, name in versions:
            try:
                count += store.delete(name.text)
            except StoreError as exc:
                self.stuck.append(f"{name.record_id}: {exc}")
        return count


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
