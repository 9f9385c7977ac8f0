"""What a lookup looked for, where, and why it served what it served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from advisor.cache.match import Difference, Query
from advisor.cache.signing import UNSIGNED
from advisor.cache.task import Task, rows

MAX_LISTED = 8
"""Near misses in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A record of the target that was not served, and every field in which it differs. `signed`: by
    the reader or their team."""

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
        query: what was looked for.
        stores: the URL of each store that was asked, in order, and what it said.
        served: id of the record whose advice is served, or ''.
        status: 'exact', 'stale', 'nearest' or 'miss'.
        reason: as `advice.reason`.
        refused: one line for each record that may not be used.
        near_misses: the other records of the target, the nearest first.
    """

    target: str
    query: Query
    stores: tuple[tuple[str, str], ...]
    served: str
    status: str
    reason: str
    refused: tuple[str, ...]
    near_misses: tuple[NearMiss, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"looked for  {self.target or 'what was tuned for this script'}"
        for name, value in self._wanted().items():
            if value not in (None, ""):
                yield f"  {name:<14}{value}"
        for position, (url, said) in enumerate(self.stores):
            yield f"{'looked in' if not position else '':<12}{url}: {said}"
        yield f"{self.status:<12}{self.reason}"
        for line in self.refused:
            yield f"refused     {line}"
        for near in self.near_misses[:MAX_LISTED]:
            differs = ", ".join(map(str, near.differs))
            fits = "it fits, but not what was asked of it (above), or another was preferred"
            unsigned = "" if near.signed else f" ({UNSIGNED})"
            yield f"not served  {near.id} {near.target}{unsigned}: {differs or fits}"
        if len(self.near_misses) > MAX_LISTED:
            yield f"            and {len(self.near_misses) - MAX_LISTED} more; see: advisor show"

    def _wanted(self) -> dict[str, object]:
        query, here = self.query, self.query.environment
        found: dict[str, object] = {"model": query.model[:12] if query.model else None}
        for name, row in rows(Task).items():
            if name in query.given and name != "target":
                found[row.keyword] = " ".join(row.kind.texts(query.given[name]))
        return found | {
            "device": here.device.name,
            "driver": here.software.driver,
            "CUDA": here.software.cuda,
            "cuDNN": here.software.cudnn,
            "torch": here.software.torch,
        }
