"""What lookups of the last days found, and what they did not find."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Subquery, case, func, select
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """What lookups did not find: `model` is the start of its fingerprint, `target` the name that a
    record of another device has for it, or ''."""

    device: str
    model: str
    target: str
    lookups: int


def missed(session: Session, most: int = 10) -> list[Missed]:
    """What was looked up on a device and is not here, the most wanted first."""
    number = func.sum(Lookup.count)
    query = (
        select(Lookup.device, Lookup.model, number)
        .where(_lately(), Lookup.outcome.in_(("miss", "nearest")))
        .group_by(Lookup.device, Lookup.model)
        .order_by(number.desc(), Lookup.device, Lookup.model)
        .limit(most)
    )
    rows = session.execute(query).all()
    called = select(Item.model, func.max(Item.called)).where(
        Item.model.in_([model for _device, model, _count in rows if model]), Item.called != ""
    )
    names = {model: name for model, name in session.execute(called.group_by(Item.model))}
    return [
        Missed(device=device, model=model, target=names.get(model, ""), lookups=int(count))
        for device, model, count in rows
    ]


def _lately() -> ColumnElement[bool]:
    return Lookup.day > int(time.time() // DAY_S) - DAYS
