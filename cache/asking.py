"""Stores asked for a training script: one after another, and within one deadline for all of them.

A training run never waits for its advice: what a store does not say in time is a miss there. Each
store is read in a thread that is left behind where it hangs, as on a file system that is away.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from advisor.cache.reader import Listing, StoredRecord, united
from advisor.cache.records import Records
from advisor.cache.stores import Remote, Store
from advisor.cache.stores.timeout import run_with_timeout
from advisor.errors import AdvisorError, StoreError

_log = logging.getLogger("advisor")

DEADLINE_S = 1.0
"""For all stores together. A local one takes 2 ms; a cold network file system some hundred."""
_LEAST_S = 0.01
MOST_TOLD = 8
"""Of the records of one store that may not be used."""

Read = Callable[[Store], Listing]
"""How a store is read: `Records.look_into` with what is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What comes of all that was found so far. `held`: what is served of it, None for nothing;
    `final`: no other store could have better."""

    held: StoredRecord | None = None
    final: bool = False


C = TypeVar("C", bound=Chosen)
Choose = Callable[[Sequence[StoredRecord]], C]


@dataclass(slots=True)
class Said(Generic[C]):
    """What the stores said.

    Attributes:
        held: what was found, each record once and where it is.
        chosen: what comes of it; None where no store could be read.
        stores: each store asked, in order, with what it said and how long that took.
        damaged: one line for each record that may not be used.
        failed: the faults of stores that could not be read.
    """

    held: list[StoredRecord] = field(default_factory=list)
    chosen: C | None = None
    stores: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    failed: list[StoreError] = field(default_factory=list)


def ask(
    records: Records, read: Read, choose: Choose[C], *, deadline_s: float = DEADLINE_S
) -> Said[C]:
    """Look into one store after another until one has the very record, on every rank alike.

    Each store has half of the time that is left, the last one all; a remote store is waited for no
    longer than its patience either, and what it then says too late is kept locally for the next
    run. What is found behind the first store is copied into those before it, by rank 0 alone.
    """
    until = time.monotonic() + deadline_s
    said: Said[C] = Said()
    behind: list[Store] = []
    for store in records.stores:
        began = time.perf_counter()
        try:
            seconds = _left(until, store)
            if store is not records.stores[-1]:
                seconds /= 2  # for those behind it, where it hangs
            keep = functools.partial(_keep, records, choose)
            listing = _one(store, functools.partial(read, store), seconds, keep)
        except StoreError as exc:
            said.failed.append(exc)
            said.stores.append((store.url, str(exc).removeprefix(f"cache {store.url}: ")))
            continue
        said.damaged += listing.damaged[:MOST_TOLD]
        if (more := len(listing.damaged) - MOST_TOLD) > 0:
            said.damaged.append(f"{store.url}: {more} more that cannot be used")
        said.held = united([*said.held, *listing.held])
        number = len(listing.held)
        count = f"{number} record{'s' * (number != 1)} of it" if number else "nothing of it"
        took = f"{(time.perf_counter() - began) * 1e3:.1f} ms"
        said.stores.append((store.url, f"{count} ({took})"))
        said.chosen = choose(said.held)
        if said.chosen.final:
            break
        behind.append(store)
    if said.chosen and said.chosen.held and _writes():
        _write_back(records, said.chosen.held, behind, until)
    return said


def _left(until: float, store: Store) -> float:
    seconds = until - time.monotonic()
    if seconds < _LEAST_S:
        raise StoreError(f"cache {store.url}: not asked, the stores before it took all the time")
    return seconds


def _one(
    store: Store, read: Callable[[], Listing], seconds: float, late: Callable[[Listing], None]
) -> Listing:
    """What a store has. Of a remote one's patience, importing its client is no part."""
    if not isinstance(store, Remote):
        return run_with_timeout(seconds, read, store.url)
    began = time.monotonic()
    patience = min(seconds, store.patience_s)
    run_with_timeout(patience, store.check_reachable, store.url, lambda _done: None)
    left = patience - (time.monotonic() - began)
    run_with_timeout(seconds, store.load, store.url, lambda _done: None)
    return run_with_timeout(max(left, patience / 4), read, store.url, late)


def _writes() -> bool:
    """One process of a job writes."""
    return os.environ.get("RANK", "0") == "0"


def _keep(records: Records, choose: Choose[C], listing: Listing) -> None:
    """Put what came too late into the first local store that takes it."""
    if not _writes():
        return
    try:
        if served := choose(listing.held).held:
            records.keep(served)
    except AdvisorError as exc:
        _log.debug("not kept: %s", exc)


def _write_back(records: Records, one: StoredRecord, stores: Sequence[Store], until: float) -> None:
    """Copy a record into the stores looked into before its own, where they take it."""
    for store in stores:
        if store is one.store:
            return
        try:
            seconds = _left(until, store)
            if isinstance(store, Remote):
                seconds = min(seconds, store.patience_s)
            copy = functools.partial(records.copy, one, store)
            run_with_timeout(seconds, copy, store.url, lambda _done: None)
        except StoreError as exc:  # read-only, or away: it stays where it is
            _log.debug("not copied: %s", exc)
