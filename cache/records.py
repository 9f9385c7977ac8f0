"""Records in one or several stores."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.cache.codec import decode, encode
from advisor.cache.name import PREFIX, Name, ranked, target_part
from advisor.cache.record import Record
from advisor.cache.seal import UNSEALED, Seal
from advisor.cache.stores import Remote, Store, studies_of
from advisor.errors import RecordDamaged, StoreError, UsageError

_decode = functools.lru_cache(maxsize=64)(decode)

Check = Callable[[Record], str]
"""What is wrong with a record, or '': what the cache cannot know, as a knob's domain."""


def _nothing_wrong(_record: Record) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A record and where it is."""

    record: Record
    name: Name
    store: Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a store holds: of each key and target the version that counts. `damaged`: one line for
    each that could not be read."""

    held: tuple[Held, ...]
    damaged: tuple[str, ...]


class Records:
    """The records in some stores, which are looked up in order.

    Attributes:
        stores: where they are.
        damaged: one line for each record that the last `all`, `find` or `get` could not read.
        unreachable: one line for each store that they could not read.
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
        self._seal = seal
        self._check = check

    @property
    def studies(self) -> Path:
        """The folder for studies."""
        return studies_of(self.stores)

    def look_into(
        self, store: Store, model: str | None = None, target: str | None = None, id: str = ""
    ) -> Listing:
        """What one store has of a model fingerprint, a target name and a start of an id.

        Raises:
            StoreError: the store cannot be read.
        """
        start = f"{PREFIX}{model[:12]}/" if model is not None else PREFIX
        part = f"/{target_part(target)}/" if target is not None else "/"
        places: dict[str, list[Name]] = {}
        for text in store.keys():
            if text.startswith(start) and part in text:  # before it is taken apart: there are many
                name = Name.parse(text)
                if name is not None and name.id.startswith(id):
                    places.setdefault(name.place, []).append(name)
        wanted = [ranked(names) for names in places.values()]
        first = store.get_many([names[0].text for names in wanted])
        held, damaged = [], []
        for names in wanted:
            for name in names:
                try:
                    data = first.get(name.text) if name is names[0] else self._get(store, name)
                    if data is None:  # removed since it was listed
                        continue
                    record = self.read(name, data)
                except RecordDamaged as exc:
                    damaged.append(f"{name.id}: {exc}")
                    continue
                if (model is None or record.key.model == model) and (
                    target is None or record.target.name == target
                ):
                    full = name
                    if not name.batch:
                        assert isinstance(data, bytes)  # else `read` had raised
                        full = Name.of(record, data).called(name.text)
                    held.append(Held(record=record, name=full, store=store))
                break  # versions behind the one that counts are not looked at
        return Listing(held=tuple(united(held)), damaged=tuple(damaged))

    @staticmethod
    def names(store: Store) -> list[Name]:
        """The names of the records in a store, versions that no longer count included."""
        return [name for text in store.keys() if (name := Name.parse(text)) is not None]

    @staticmethod
    def _get(store: Store, name: Name) -> bytes | RecordDamaged | None:
        return store.get_many([name.text]).get(name.text)

    def read(self, name: Name, data: bytes | RecordDamaged) -> Record:
        """The record in what `get_many` gave, if it may be used and is what its name says.

        Raises:
            RecordDamaged: why not.
        """
        if isinstance(data, RecordDamaged):
            raise data
        record = _decode(data, self._seal)
        if wrong := self._check(record):
            raise RecordDamaged(f"record: {wrong}; refused")
        if name.version.created and Name.of(record, data).text != name.text:
            raise RecordDamaged(f"record: it is not what its name {name.text} says; refused")
        if name.version.created == 0 and not Name.place_of(record).startswith(name.text + "/"):
            raise RecordDamaged(f"record: it is of another key than its name {name.text} says")
        return record

    def held(self, model: str | None = None, target: str | None = None, id: str = "") -> list[Held]:
        """What all stores have; of the same record in several, the version that counts.

        Raises:
            StoreError: no store can be read.
        """
        self.damaged, self.unreachable = [], []
        found: list[Held] = []
        failed: StoreError | None = None
        for store in self.stores:
            try:
                listing = self.look_into(store, model, target, id)
            except StoreError as exc:
                failed = failed or exc
                self.unreachable.append(str(exc))
                continue
            self.damaged += listing.damaged
            found += listing.held
        if failed is not None and len(self.unreachable) == len(self.stores):
            raise failed
        return united(found)

    def all(self) -> list[Record]:
        """Every record that can be read."""
        return [one.record for one in self.held()]

    def find(self, model: str | None = None, target: str | None = None) -> list[Record]:
        """The records of a model fingerprint, a target name, or both."""
        return [one.record for one in self.held(model, target)]

    def get(self, id_prefix: str) -> Record:
        """The record whose id begins so; of several targets with the same key, the newest.

        Raises:
            UsageError: none does, or records with different ids do. RecordDamaged: it cannot be
                read.
        """
        found = [one.record for one in self.held(id=id_prefix)] if id_prefix else []
        ids = sorted({record.id for record in found} | {line[:12] for line in self.damaged})
        if not id_prefix or not ids:
            raise UsageError(f"key {id_prefix!r}: no such record; run: advisor show")
        if len(ids) > 1:
            raise UsageError(f"key {id_prefix!r}: several begin so: {', '.join(ids)}; give more")
        if not found:
            raise RecordDamaged("; ".join(self.damaged))
        return max(found, key=lambda record: record.provenance.created)

    def put(self, record: Record, *, revises: Record | None = None) -> Store:
        """Keep it in the first store that can be written; which one that is.

        Args:
            revises: what it was made of: what a newer version of advisor put there stays.

        Raises:
            StoreError: no store can be written. RecordDamaged: it is no sound record.
        """
        data = encode(record, self._seal, revises=self._bytes(revises) if revises else b"")
        name = Name.of(record, data)
        self.unreachable = []
        failed: StoreError | None = None
        for store in self.stores:
            try:
                store.put(name.text, data)
            except StoreError as exc:
                failed = failed or exc
                self.unreachable.append(str(exc))
            else:
                return store
        assert failed is not None
        raise failed

    def _bytes(self, record: Record) -> bytes:
        for one in self.held(record.key.model, record.target.name, record.id):
            if one.record == record:
                data = one.store.get(one.name.text)
                return data or b""
        return b""

    def health(self, store: Store) -> str:
        """What a store says of itself, and how many of its records cannot be used."""
        said = store.health()
        if not said.startswith("ok"):
            return said
        try:
            listing = self.look_into(store)
        except StoreError as exc:
            return f"unusable: {exc}"
        count = f"{len(listing.held)} record{'s' * (len(listing.held) != 1)}"
        bad = f", {len(listing.damaged)} unreadable" if listing.damaged else ""
        return f"{said}: {count}{bad}"

    @staticmethod
    def copy(one: Held, store: Store) -> None:
        """Put a record into another store, if that has it not.

        Raises:
            StoreError: one of the stores cannot be read or written.
        """
        data = one.store.get(one.name.text)
        if data is not None and store.get_many([one.name.text]).get(one.name.text) != data:
            store.put(one.name.text, data)

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
        place = Name.place_of(record)
        for store in self.stores:
            try:
                names = self.names(store)
            except StoreError as exc:
                self.unreachable.append(str(exc))
                continue
            found += [
                (store, name)
                for name in names
                if name.place == place or (name.batch == 0 and place.startswith(f"{name.text}/"))
            ]
        return found

    def remove(self, versions: Iterable[tuple[Store, Name]]) -> int:
        """Remove versions where their store takes it; how many were there."""
        count = 0
        for store, name in versions:
            with contextlib.suppress(StoreError):
                count += store.delete(name.text)
        return count

    def delete(self, record: Record) -> bool:
        """Remove every version of a record from every store that can be read; whether it was there.

        Raises:
            StoreError: a store that has it cannot be written.
        """
        return any([store.delete(name.text) for store, name in self.versions(record)])

    def delete_damaged(self, id_prefix: str = "") -> int:
        """Remove every version that cannot be read and whose id begins so; how many there were.

        `damaged` has a line for each that cannot be removed, `unreachable` one for each store that
        cannot be read.
        """
        count = 0
        self.damaged, self.unreachable = [], []
        for store in self.stores:
            try:
                names = [name for name in self.names(store) if name.id.startswith(id_prefix)]
            except StoreError as exc:
                self.unreachable.append(str(exc))
                continue
            for name in names:
                try:
                    count += self._is_damaged(store, name) and store.delete(name.text)
                except StoreError as exc:
                    self.damaged.append(f"{name.id}: {exc}")
        return count

    def _is_damaged(self, store: Store, name: Name) -> bool:
        data = self._get(store, name)
        try:
            if data is not None:
                self.read(name, data)
        except RecordDamaged:
            return True
        return False


def united(held: Iterable[Held]) -> list[Held]:
    """Of the same record in several stores, the version that counts."""
    places: dict[str, list[Held]] = {}
    for one in held:
        places.setdefault(one.name.place, []).append(one)
    return [
        next(one for one in several if one.name == ranked(o.name for o in several)[0])
        for several in places.values()
    ]


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
