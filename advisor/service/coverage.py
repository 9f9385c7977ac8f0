"""What lookups of the last days found, and what they did not find."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, RowMapping, Subquery, case, func, select
from sqlalchemy.orm import Session

from advisor.service.database import DAY_S
from advisor.service.schema import Item, Lookup

DAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How often lookups found a record that answers (`exact`), one that was measured with other
    software (`stale`), only one of another task or device (`nearest`), or nothing (`miss`)."""

    exact: int = 0
    stale: int = 0
    nearest: int = 0
    miss: int = 0

    @property
    def lookups(self) -> int:
        return self.exact + self.stale + self.nearest + self.miss

    @property
    def share(self) -> float:
        """The share of lookups that found a record to start with."""
        return (self.exact + self.stale) / self.lookups if self.lookups else 0.0


def covered(session: Session) -> Coverage:
    query = select(Lookup.outcome, func.sum(Lookup.count)).where(_lately())
    rows = session.execute(query.group_by(Lookup.outcome))
    return Coverage(**{outcome: int(count) for outcome, count in rows})


def uses() -> Subquery:
    """How often each record was found, by its place: `used`, and with other software `stale`."""
    stale = case((Lookup.outcome == "stale", Lookup.count), else_=0)
    sums = (func.sum(Lookup.count).label("used"), func.sum(stale).label("stale"))
    found = (_lately(), Lookup.place != "", Lookup.outcome.in_(("exact", "stale")))
    return select(Lookup.place, *sums).where(*found).group_by(Lookup.place).subquery()


def missed(session: Session, most: int = 10) -> Sequence[RowMapping]:
    """What was looked up on a device and is not here, the most wanted first: `model` is the start
    of its fingerprint, `target` the name that a record of another device has for it, or ''."""
    lookups = func.sum(Lookup.count).label("lookups")
    same = (Item.model == Lookup.model, Lookup.model != "", Item.called != "")
    called = select(func.max(Item.called)).where(*same).scalar_subquery()
    target = func.coalesce(called, "").label("target")
    query = (
        select(Lookup.device, Lookup.model, target, lookups)
        .where(_lately(), Lookup.outcome.in_(("miss", "nearest")))
        .group_by(Lookup.device, Lookup.model)
        .order_by(lookups.desc(), Lookup.device, Lookup.model)
    )
    return session.execute(query.limit(most)).mappings().all()


def _lately() -> ColumnElement[bool]:
    return Lookup.day > int(time.time() // DAY_S) - DAYS
