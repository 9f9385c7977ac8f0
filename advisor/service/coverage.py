"""How much of what runs is covered by records, and what would be worth measuring next: from what
lookups found in the last days."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Subquery, and_, func, select
from sqlalchemy.orm import Session

from advisor.service.database import DAY_S, now
from advisor.service.schema import Attempt, Item, Job, Lookup

DAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """How often lookups for a device found a record that answers, one of another software, one
    of another task or device, which serves only who asks for the nearest, or none."""

    device: str
    exact: int = 0
    stale: int = 0
    nearest: int = 0
    miss: int = 0

    @property
    def lookups(self) -> int:
        return self.exact + self.stale + self.nearest + self.miss

    @property
    def share(self) -> float:
        """Of the lookups, those that found a record of what they asked for."""
        return (self.exact + self.stale) / self.lookups if self.lookups else 0.0


def covered(session: Session) -> list[Covered]:
    """Of each kind of device that was asked for, the most asked for first."""
    query = select(Lookup.device, Lookup.outcome, func.sum(Lookup.count)).where(_lately())
    counts: dict[str, dict[str, int]] = {}
    for device, outcome, count in session.execute(query.group_by(Lookup.device, Lookup.outcome)):
        counts.setdefault(device, {})[outcome] = int(count)
    found = [Covered(device=device, **known) for device, known in counts.items()]
    return sorted(found, key=lambda one: (-one.lookups, one.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What can be known of the GPU hours that records save.

    Attributes:
        starts: lookups that found an exact record which is faster than what was there before.
        share: the sum over them of 1 - 1 / speed-up: hours saved where each had trained for one
            hour on one GPU.
    """

    starts: int
    share: float


def spent(session: Session) -> float:
    """GPU hours that attempts took."""
    since = now(session) - DAYS * DAY_S
    until = func.coalesce(Attempt.ended, Attempt.beat)
    seconds = select(func.sum((until - Attempt.started) * Job.gpus)).select_from(Attempt)
    query = seconds.join(Job, Attempt.job == Job.id).where(Attempt.started > since)
    return float(session.scalar(query) or 0.0) / 3600.0


def saved(session: Session) -> Saved:
    """Of lookups whose record is here still, by its newest version."""
    last = _newest()
    part = Lookup.count * (1.0 - 1.0 / last.c.speedup)
    query = (
        select(func.sum(Lookup.count), func.sum(part))
        .join(last, Lookup.place == last.c.place)
        .where(_lately(), Lookup.outcome == "exact", last.c.speedup > 1.0)
    )
    starts, share = session.execute(query).one()
    return Saved(starts=int(starts or 0), share=float(share or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for and would be worth measuring.

    Attributes:
        model: the first digits of its fingerprint.
        target: as a record of it calls it, of whatever device; '' where there is none.
        record: of a stale one, as people type it; else ''.
        lookups: how many asked.
    """

    device: str
    model: str
    target: str
    record: str
    lookups: int


def missed(session: Session, most: int = 10) -> list[Wanted]:
    """What was asked for and is not here, of that task and device, the most asked for first."""
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
        Wanted(
            device=device, model=model, target=names.get(model, ""), record="", lookups=int(count)
        )
        for device, model, count in rows
    ]


def outdated(session: Session, most: int = 10) -> list[Wanted]:
    """Records that serve although the software changed since, the most asked for first.

    Those who asked before the last record of this model, batch and device came, or on that day, do
    not count: they may find it now.
    """
    last, number = _newest(), func.sum(Lookup.count)
    of_last = (Item.model, Item.batch, Item.device)
    came = (
        select(*of_last, func.max(Item.stored).label("stored"))
        .where(Item.model.in_(select(last.c.model)), Item.fields != "")
        .group_by(*of_last)
        .subquery()
    )
    same = [came.c[column.name] == last.c[column.name] for column in of_last]
    of_record = (last.c.id, last.c.batch, last.c.called)
    query = (
        select(Lookup.device, func.max(Lookup.model), *of_record, number)
        .join(last, Lookup.place == last.c.place)
        .join(came, and_(*same))
        .where(_lately(), Lookup.outcome == "stale", Lookup.day * DAY_S > came.c.stored)
        .group_by(Lookup.device, *of_record)
        .order_by(number.desc(), last.c.id)
        .limit(most)
    )
    return [
        Wanted(
            device=device, model=model, target=called, record=f"{id}@{batch}", lookups=int(count)
        )
        for device, model, id, batch, called, count in session.execute(query)
    ]


def _lately() -> ColumnElement[bool]:
    return Lookup.day > int(time.time() // DAY_S) - DAYS


def _newest() -> Subquery:
    """The newest version of each record that was found lately, one row a place."""
    found = select(Lookup.place).where(_lately(), Lookup.place != "")
    created = select(Item.place, func.max(Item.created).label("created"))
    of_records = (Item.fields != "", Item.place.in_(found))
    last = created.where(*of_records).group_by(Item.place).subquery()
    columns = (
        Item.place,
        func.max(Item.model).label("model"),
        func.max(Item.device).label("device"),
        func.max(Item.id).label("id"),
        func.max(Item.batch).label("batch"),
        func.max(Item.called).label("called"),
        func.max(Item.speedup).label("speedup"),
    )
    same = (Item.place == last.c.place) & (Item.created == last.c.created)
    return select(*columns).join(last, same).group_by(Item.place).subquery()
