"""Look into the stores for a training script: one after another, within one deadline for all; and
explain what was looked for, where, and why a record or none was served.

A training run never waits for its advice: a store that does not answer in time counts as a miss.
Each store is read in a thread, which is abandoned if it hangs, as when the network is down.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from advisor.cache.match import Difference, Match, Query
from advisor.cache.reader import Listing, RecordFilter, StoredRecord, united
from advisor.cache.records import Records
from advisor.cache.signing import UNSIGNED
from advisor.cache.stores import ByteStore, Remote
from advisor.cache.stores.timeout import run_with_timeout
from advisor.cache.task import Task, rows
from advisor.errors import AdvisorError, StoreError

_log = logging.getLogger("advisor")

DEADLINE_S = 1.0
"""For all stores together. A local store takes 2 ms, a cold network file system some 100 ms."""
_SHORTEST_S = 0.01
MAX_REFUSED, MAX_LISTED = 8, 8

Choose = Callable[[Sequence[StoredRecord]], Match]


def ask(
    records: Records,
    sought: RecordFilter,
    choose: Choose,
    found: Explanation,
    *,
    deadline_s: float = DEADLINE_S,
) -> tuple[Match | None, list[StoredRecord]]:
    """Look into one store after another until a match is final, on every rank alike.

    Each store gets half of the time that is left, the last one all of it. A remote store also gets
    no more than its `timeout_s`; its late answer is kept locally for the next run. Rank 0 copies a
    record that is found in a later store into the stores before it. `found` gets the answers of
    the stores.

    Returns:
        (The match; None if no store could be read. The records found, each once.)
    """
    until = time.monotonic() + deadline_s
    match: Match | None = None
    held: list[StoredRecord] = []
    behind: list[ByteStore] = []
    for store in records.stores:
        began = time.perf_counter()
        try:
            seconds = _left(until, store)
            if store is not records.stores[-1]:
                seconds /= 2  # if this one hangs, the next have time
            read = functools.partial(records.look_into, store, sought)
            listing = _read(store, read, seconds, functools.partial(_keep, records, choose))
        except StoreError as exc:
            found.failed.append(str(exc))
            found.stores.append((store.url, str(exc).removeprefix(f"cache {store.url}: ")))
            continue
        found.refused += listing.damaged[:MAX_REFUSED]
        if (more := len(listing.damaged) - MAX_REFUSED) > 0:
            found.refused.append(f"{store.url}: {more} more that cannot be used")
        held = united([*held, *listing.held])
        number = len(listing.held)
        count = f"{number} record{'s' * (number != 1)} found" if number else "no record found"
        took = f"{(time.perf_counter() - began) * 1e3:.1f} ms"
        found.stores.append((store.url, f"{count} ({took})"))
        match = choose(held)
        if match.final:
            break
        behind.append(store)
    if match and match.held and _writes():
        _write_back(records, match.held, behind, until)
    return match, held


def _left(until: float, store: ByteStore) -> float:
    if (seconds := until - time.monotonic()) < _SHORTEST_S:
        raise StoreError(f"cache {store.url}: not asked, the stores before it took all the time")
    return seconds


def _read(
    store: ByteStore, read: Callable[[], Listing], seconds: float, late: Callable[[Listing], None]
) -> Listing:
    """Read a store. Importing a remote store's client does not count against its `timeout_s`."""
    if not isinstance(store, Remote):
        return run_with_timeout(seconds, read, store.url)
    began = time.monotonic()
    patience = min(seconds, store.timeout_s)
    run_with_timeout(patience, store.check_reachable, store.url)
    left = patience - (time.monotonic() - began)
    run_with_timeout(seconds, store.load, store.url)
    return run_with_timeout(max(left, patience / 4), read, store.url, late)


def _writes() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _keep(records: Records, choose: Choose, listing: Listing) -> None:
    """Put the chosen record of a late answer into the first local store that takes it."""
    try:
        if _writes() and (held := choose(listing.held).held):
            records.keep(held)
    except AdvisorError as exc:
        _log.debug("not kept: %s", exc)


def _write_back(
    records: Records, one: StoredRecord, stores: Sequence[ByteStore], until: float
) -> None:
    """Copy a record into the stores before its own, as far as they take it."""
    for store in itertools.takewhile(lambda store: store is not one.store, stores):
        try:
            seconds = _left(until, store)
            if isinstance(store, Remote):
                seconds = min(seconds, store.timeout_s)
            copy = functools.partial(records.copy, one, store)
            run_with_timeout(seconds, copy, store.url, lambda _done: None)
        except StoreError as exc:  # read-only or away
            _log.debug("not copied: %s", exc)


class NearMiss(Struct, frozen=True, kw_only=True):
    """A record of the target that was not served, and every field in which it differs. `signed`: by
    the reader or their team."""

    id: str
    target: str
    store: str
    signed: bool
    differs: tuple[Difference, ...]


@dataclass(slots=True, kw_only=True)
class Explanation:
    """Explains one lookup; its str() is for people.

    Attributes:
        target: as asked for; '' for the running script's.
        stores: the URL of each store that was asked, in order, its answer in words and the time.
        refused: one line for each record that may not be used.
        failed: one line for each store that could not be read.
        served: id of the record whose advice is served, or ''.
        status: 'exact', 'stale' or 'miss'; `reason` as `advice.reason`.
        near_misses: the other records of the target, the nearest first.
    """

    target: str
    query: Query
    stores: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    served: str = ""
    status: str = "miss"
    reason: str = ""
    near_misses: tuple[NearMiss, ...] = ()

    def __str__(self) -> str:
        lines = [f"looked for  {self.target or 'what was tuned for this script'}"]
        wanted = self._wanted().items()
        lines += [f"  {name:<14}{value}" for name, value in wanted if value not in (None, "")]
        for url, said in self.stores:
            lines.append(f"{'looked in' if url == self.stores[0][0] else '':<12}{url}: {said}")
        lines.append(f"{self.status:<12}{self.reason}")
        lines += [f"refused     {line}" for line in self.refused]
        for near in self.near_misses[:MAX_LISTED]:
            differs = ", ".join(map(str, near.differs))
            fits = "it fits, but cannot serve this (see above), or another was preferred"
            unsigned = "" if near.signed else f" ({UNSIGNED})"
            lines.append(f"not served  {near.id} {near.target}{unsigned}: {differs or fits}")
        if (more := len(self.near_misses) - MAX_LISTED) > 0:
            lines.append(f"            and {more} more; see: advisor show")
        return "\n".join(lines)

    def _wanted(self) -> dict[str, object]:
        query, here = self.query, self.query.environment
        found: dict[str, object] = {"model": query.model[:12] if query.model else None}
        for name, row in rows(Task).items():
            if name in query.given and name != "target":
                found[row.keyword] = " ".join(row.kind.texts(query.given[name]))
        software = here.software
        versions = {"driver": software.driver, "CUDA": software.cuda, "cuDNN": software.cudnn}
        return found | {"device": here.device.name} | versions | {"torch": software.torch}
