"""What is looked up, and how it was answered, so that a team sees what is covered. Counted in
memory first: no lookup waits for it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, RowMapping, Subquery, case, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from advisor.cache.match import Kind
from advisor.service.database import DAY_S, Database
from advisor.service.records import Found, Question
from advisor.service.schema import Item, Lookup

OUTCOMES: Mapping[Kind, str] = {"exact": "exact", "compatible": "stale", "miss": "nearest"}
"""By how the nearest record matches; 'miss' if there is none."""
DAYS, KEPT_DAYS = 30, 400
"""Of lookups that the pages count, and that the database keeps."""
MOST_KINDS = 2000
"""Different lookups that are counted between two times that they are written."""
MOST_DEVICE = 100
Counts = Counter[tuple[int, str, str, str, str]]
"""By the day and the other columns of the table's key, in its order."""


class Lookups:
    """Of one server, since they were last written."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._lock = threading.Lock()

    def count(self, question: Question, found: Found) -> None:
        """Count one for a device, as scripts make them, and lists and tunings do not."""
        device = str(question.fields.get("device.name", ""))[:MOST_DEVICE]
        if not device or question.family is not None or question.command:
            return
        outcome = OUTCOMES[found.kind] if found.record_key else "miss"
        key = (_today(), device, found.record_key, question.model[:12], outcome)
        with self._lock:
            if key in self._counts or len(self._counts) < MOST_KINDS:
                self._counts[key] += 1

    def flush(self, database: Database) -> None:
        """Write them.

        Raises:
            StoreError: the database cannot be written; they are written the next time.
        """
        with self._lock:
            counts, self._counts = self._counts, Counts()
        try:
            with database.writing() as session:
                _add(session, counts)
        except BaseException:
            with self._lock:
                self._counts.update(counts)
            raise


def _add(session: Session, counts: Counts) -> None:
    """In one statement: while thousands are made, no lookup is answered."""
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    table = Lookup.__table__
    added = dialect.insert(table)
    more = table.c.count + added.excluded.count
    names = [column.name for column in table.primary_key]
    # In one order: servers wait for each other's rows.
    rows = [dict(zip(names, key, strict=True), count=counts[key]) for key in sorted(counts)]
    if rows:
        statement = added.on_conflict_do_update(index_elements=names, set_={"count": more})
        session.connection().execute(statement, rows)


def _today() -> int:
    return int(time.time() // DAY_S)


def tidy(session: Session) -> None:
    """Forget those of long ago."""
    session.execute(delete(Lookup).where(Lookup.day < _today() - KEPT_DAYS))


def covered(session: Session) -> Counter[str]:
    """How often lookups of the last DAYS found a record that answers (`exact`), one that was
    measured with other software (`stale`), one of another task or device (`nearest`), or nothing
    (`miss`)."""
    query = select(Lookup.outcome, func.sum(Lookup.count)).where(_lately())
    rows = session.execute(query.group_by(Lookup.outcome))
    return Counter({outcome: int(count) for outcome, count in rows})


def uses() -> Subquery:
    """How often each record was found, by its key: `used`, and with other software `stale`."""
    stale = case((Lookup.outcome == "stale", Lookup.count), else_=0)
    sums = (func.sum(Lookup.count).label("used"), func.sum(stale).label("stale"))
    found = (_lately(), Lookup.record_key != "", Lookup.outcome.in_(("exact", "stale")))
    return select(Lookup.record_key, *sums).where(*found).group_by(Lookup.record_key).subquery()


def missed(session: Session, most: int = 10) -> Sequence[RowMapping]:
    """What was looked up on a device and is not here, the most wanted first: `model` is the start
    of its fingerprint, `target` the name that a record of another device has for it, or ''."""
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
