"""Explains a lookup: what it looked for, where, and why this record or none was served."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from advisor.cache.match import Difference, Query
from advisor.cache.signing import UNSIGNED
from advisor.cache.task import Task, rows

MAX_LISTED = 8


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
        status: 'exact', 'stale', 'nearest' or 'miss'; `reason` as `advice.reason`.
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
