"""Counts lookups by outcome, in memory first, so that a team sees which records are missing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, RowMapping, Subquery, case, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from advisor.cache.match import MatchKind
from advisor.service.database import DAY_S, Database
from advisor.service.records import Found, Question
from advisor.service.schema import Item, Lookup

BY_MATCH: Mapping[MatchKind, str] = {"exact": "exact", "compatible": "stale", "miss": "nearest"}
"""The outcome, by how the nearest record matches; 'miss' if there is no record."""
DAYS, KEPT_DAYS = 30, 400  # days of lookups that the pages count, and that the database keeps
MAX_KINDS = 2000  # different lookups that are counted between two writes, at most
MAX_DEVICE = 100


class LookupCounter:
    """One server's counts since the last write, by the primary key of the table `lookups`."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, str, str, str, str]] = Counter()
        self._lock = threading.Lock()

    def count(self, question: Question, found: Found) -> None:
        """Count a lookup if a script made it. Lookups of lists and tunings are not counted."""
        device = str(question.fields.get("device.name", ""))[:MAX_DEVICE]
        if not device or question.family is not None or question.command:
            return
        outcome = BY_MATCH[found.kind] if found.record_key else "miss"
        key = (_today(), device, found.record_key, question.model[:12], outcome)
        with self._lock:
            if key in self._counts or len(self._counts) < MAX_KINDS:
                self._counts[key] += 1

    def flush(self, database: Database) -> None:
        """Write the counts to the database. If that fails, the next call writes them too."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        if not counts:
            return
        names = [column.name for column in Lookup.__table__.primary_key]
        # One statement for all rows, sorted: servers wait for each other's rows.
        rows = [dict(zip(names, key, strict=True), count=counts[key]) for key in sorted(counts)]
        try:
            with database.writing() as session:
                insert = (sqlite if database.file else postgresql).insert(Lookup)
                more = {"count": Lookup.count + insert.excluded["count"]}
                insert = insert.on_conflict_do_update(index_elements=names, set_=more)
                session.connection().execute(insert, rows)
        except BaseException:
            with self._lock:
                self._counts.update(counts)
            raise


def _today() -> int:
    return int(time.time() // DAY_S)


def tidy(session: Session) -> None:
    """Remove counts that are older than KEPT_DAYS."""
    session.execute(delete(Lookup).where(Lookup.day < _today() - KEPT_DAYS))


def covered(session: Session) -> Counter[str]:
    """Lookups of the last DAYS by outcome: 'exact' found an answer, 'stale' an answer from other
    software, 'nearest' only a record of another task or device, 'miss' no record."""
    query = select(Lookup.outcome, func.sum(Lookup.count)).where(_lately())
    rows = session.execute(query.group_by(Lookup.outcome))
    return Counter({outcome: int(count) for outcome, count in rows})


def uses() -> Subquery:
    """Subquery: how often a record was found (`used`), and with other software (`stale`)."""
    stale = case((Lookup.outcome == "stale", Lookup.count), else_=0)
    sums = (func.sum(Lookup.count).label("used"), func.sum(stale).label("stale"))
    found = (_lately(), Lookup.record_key != "", Lookup.outcome.in_(("exact", "stale")))
    return select(Lookup.record_key, *sums).where(*found).group_by(Lookup.record_key).subquery()


def missed(session: Session, most: int = 10) -> Sequence[RowMapping]:
    """Lookups without an answer by device and model, the most frequent first. `model`: the start of
    its fingerprint; `target`: its name in a record of another device, or ''."""
    lookups = func.sum(Lookup.count).label("lookups")
    same = (Item.model == Lookup.model, Lookup.model != "", Item.called != "")
    called = select(func.max(Item.called)).where(*same).scalar_subquery()
    query = (
        select(Lookup.device, Lookup.model, func.coalesce(called, "").label("target"), lookups)
        .where(_lately(), Lookup.outcome.in_(("miss", "nearest")))
        .group_by(Lookup.device, Lookup.model)
        .order_by(lookups.desc(), Lookup.device, Lookup.model)
    )
    return session.execute(query.limit(most)).mappings().all()


def _lately() -> ColumnElement[bool]:
    return Lookup.day > _today() - DAYS
