"""What a lookup looked for, where, and why it found what it found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from advisor.cache.match import Difference, Query, compare
from advisor.cache.record import Record
from advisor.cache.seal import UNSIGNED
from advisor.cache.task import Task, rows

MOST = 8
"""Near misses that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record of the target, in which store. `signed`: by the reader or their team; `apart`: in
    what it is of another file or of other code than is meant."""

    store: str
    record: Record
    signed: bool
    apart: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A record that was not served, and every field in which it differs."""

    id: str
    target: str
    store: str
    signed: bool
    differs: tuple[Difference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """str() of it is for people.

    Attributes:
        target: as asked for; '' for the running script's.
        query: what was looked for: None in it constrains nothing.
        stores: each store's URL and what it said, in order; those behind an exact hit, signed by
            the reader or their team, were not asked.
        served: id of the record whose advice is served, or ''.
        status: 'exact', 'stale', 'nearest' or 'miss'.
        reason: as `advice.reason`.
        refused: one line for each record that may not be used.
        seen: the records of this target.
    """

    target: str
    query: Query
    stores: tuple[tuple[str, str], ...]
    served: str
    status: str
    reason: str
    refused: tuple[str, ...]
    seen: tuple[Seen, ...]

    @property
    def near_misses(self) -> tuple[NearMiss, ...]:
        """Records of this target that were not served, the nearest first."""
        found = [
            NearMiss(
                id=one.record.id,
                target=one.record.target.name,
                store=one.store,
                signed=one.signed,
                differs=(*one.apart, *compare(self.query, one.record.key)[1]),
            )
            for one in self.seen
            if one.record.id != self.served
        ]
        return tuple(sorted(found, key=lambda one: len(one.differs)))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        query, here = self.query, self.query.environment
        yield f"looked for  {self.target or 'what was tuned for this script'}"
        stated: dict[str, object] = {"model": query.model[:12] if query.model else None}
        for name, row in rows(Task).items():
            if name in query.given and name != "target":
                stated[row.keyword] = " ".join(row.kind.texts(query.given[name]))
        stated |= {
            "device": here.device.name,
            "driver": here.software.driver,
            "CUDA": here.software.cuda,
            "cuDNN": here.software.cudnn,
            "torch": here.software.torch,
        }
        for name, value in stated.items():
            if value not in (None, ""):
                yield f"  {name:<14}{value}"
        for position, (url, said) in enumerate(self.stores):
            yield f"{'looked in' if not position else '':<12}{url}: {said}"
        yield f"{self.status:<12}{self.reason}"
        for line in self.refused:
            yield f"refused     {line}"
        for near in self.near_misses[:MOST]:
            differs = ", ".join(map(str, near.differs))
            fits = "it fits, but not what was asked of it (above), or another was preferred"
            unsigned = "" if near.signed else f" ({UNSIGNED})"
            yield f"not served  {near.id} {near.target}{unsigned}: {differs or fits}"
        if len(self.near_misses) > MOST:
            yield f"            and {len(self.near_misses) - MOST} more; see: advisor show"
