"""Records carried from store to store: export, import, sync and gc."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.cache import exchange
from advisor.cache.exchange import Carried
from advisor.cache.garbage import LEFT, Garbage, garbage
from advisor.cache.name import Name
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.settings import cache_urls
from advisor.cache.stores import Store
from advisor.errors import NoRecord, StoreError, UsageError
from advisor.opening import Cache, open_records

GC_KINDS = "superseded", "stale", "damaged", "oversized"
"""Why `gc` takes what it takes, in one word; only artifacts are oversized."""

Wanted = Callable[[Record], bool]
"""Which records to take; `Only` is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Only:
    """Which records to take: every one where nothing is said."""

    target: str | None = None
    device: str | None = None
    keys: Sequence[str] = ()

    def __call__(self, record: Record) -> bool:
        return (
            (self.target is None or self.target in record.target.name)
            and (
                self.device is None
                or self.device.lower() in record.key.environment.device.name.lower()
            )
            and (not self.keys or any(_names(key, record) for key in self.keys))
        )


def _names(key: str, record: Record) -> bool:
    start, _, batch = key.partition("@")
    return record.key.id.startswith(start) and batch in ("", str(record.batch))


def export(file: Path, only: Wanted, *, cache: Cache = None) -> tuple[int, list[str]]:
    """Write the records that count into a pack: how many, and a line for each that is not sound.

    Raises:
        StoreError: nothing can be read, or the file not written. NoRecord: nothing fits.
    """
    records = open_records(cache, fallback=True)
    if not any(only(record) for record in records.all()):
        why = "; ".join(["", *records.unreachable])
        raise NoRecord(f"export: no record fits; to see what there is, run: advisor show{why}")
    count, damaged = exchange.export(records, file, only)
    return count, [*records.unreachable, *damaged]


def import_(file: Path, only: Wanted, *, cache: Cache = None) -> tuple[str, Iterator[Carried]]:
    """Take a pack's records into the first store that can be written: which one that is, and what
    became of each.

    Raises:
        StoreError: the file is no pack, or no store can be written.
    """
    if not file.is_file():
        raise UsageError(f"import {str(file)!r}: there is no such file")
    records = open_records(cache)
    store = records.first_writable()
    return store.url, exchange.unpack(file, records, store, only)


def sync(source: str, target: str, only: Wanted) -> Iterator[Carried]:
    """Put every version of what one store has into another, and its artifacts as far as you or your
    team signed them; what became of each.

    No record in the other store is changed or lost, so stores may be synced in any order.

    Raises:
        StoreError: one of them cannot be read or written.
    """
    if len(cache_urls([source, target])) != 2:
        raise UsageError("sync: expected one store's URL for each side")
    records = open_records([source, target])
    here, there = records.stores[:2]
    if here.url == there.url:
        raise UsageError(f"sync: both are {here.url}")
    if not here.keys():
        raise UsageError(f"sync: there is nothing in {here.url}")
    there.check_writable()
    places: set[str] = set()
    for carried in exchange.carry(exchange.contents(here), records, there, only):
        name = Name.parse(carried.name)
        if name is not None and carried.outcome != "refused":
            places.add(name.record_key)
        yield carried
    yield from exchange.carry_artifacts(records, here, there, places)


def gc(kinds: Sequence[str] = GC_KINDS, *, cache: Cache = None) -> tuple[Records, list[Garbage]]:
    """What may go from each store. Nothing is removed yet; `remove` does.

    Stores that cannot be read are in the records' `unreachable`.

    Raises:
        StoreError: no store can be read.
    """
    records = open_records(cache)
    there = records.of_each(lambda store: garbage(records, store))
    found = [one for _store, going in there for one in going if one.kind in (*kinds, LEFT)]
    return records, found


def remove(records: Records, going: Sequence[Garbage]) -> list[str]:
    """Remove exactly these; a line for each that stays, as in `records.stuck`."""
    records.stuck = []
    for one in going:
        try:
            one.remove()
        except (StoreError, OSError) as exc:
            records.stuck.append(f"{one.what}: {exc}")
    return records.stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelved:
    """How many artifacts a store has, and their bytes; `foreign`: how many of them are of a key
    that is none of the reader's or their team's."""

    store: Store
    number: int
    size: int
    foreign: int


def shelved(records: Records) -> list[Shelved]:
    """What each store that can be read has of artifacts, where it has any."""
    found = []
    for store in records.stores:
        with contextlib.suppress(StoreError):
            there = records.artifacts.on(store)
            if there:
                number, foreign = len(there), sum(not label.trusted for label in there)
                total = sum(there.values())
                found.append(Shelved(store=store, number=number, size=total, foreign=foreign))
    return found
