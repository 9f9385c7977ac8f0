"""Records carried from store to store: export, import, sync and gc."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.cache import exchange
from advisor.cache.exchange import Carried, Waste
from advisor.cache.record import Record
from advisor.cache.settings import cache_urls
from advisor.cache.stores import Store
from advisor.errors import NoRecord, StoreError, UsageError
from advisor.opening import Cache, open_records
from advisor.printed import staleness

GC_KINDS = ("superseded", "stale")


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
            and (not self.keys or any(record.id.startswith(key) for key in self.keys))
        )


def export(file: Path, only: Only, *, cache: Cache = None) -> tuple[int, list[str]]:
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


def import_(file: Path, only: Only, *, cache: Cache = None) -> tuple[str, Iterator[Carried]]:
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


def sync(source: str, target: str, only: Only) -> Iterator[Carried]:
    """Put every version of what one store has into another; what became of each.

    Nothing in the other store is changed or lost, so stores may be synced in any order.

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
    yield from exchange.carry(exchange.contents(here), records, there, only)


def gc(
    kinds: Sequence[str] = GC_KINDS, *, remove: bool = False, cache: Cache = None
) -> Iterator[tuple[Store, Waste]]:
    """What may go from each store, and with `remove` goes: versions that no longer count, records
    marked stale, and those of this device under other software where a sound one is there too.

    Raises:
        StoreError: a store cannot be read or written; the others are done.
    """
    records = open_records(cache)
    failed: list[StoreError] = []
    for store in records.stores:
        try:
            if remove:
                store.check_writable()
            found = list(exchange.waste(records, store, is_outdated=_outdated))
        except StoreError as exc:
            failed.append(exc)
            continue
        for one in found:
            if one.reason.partition(":")[0] in kinds:
                if remove:
                    store.delete(one.name.text)
                yield store, one
        if remove:
            exchange.tidy(store)
    if failed:
        raise failed[0]


def _outdated(record: Record) -> str:
    return ", ".join(map(str, staleness(record)))
