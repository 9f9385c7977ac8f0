"""What is looked up, and how it was answered: so that a team sees what is covered, and what is
measured again is what is in use. Counted in memory: no lookup waits for it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import delete
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from advisor.cache.match import Kind
from advisor.service.database import DAY_S, Database
from advisor.service.records import Found, Question
from advisor.service.schema import Lookup

OUTCOMES: Mapping[Kind, str] = {"exact": "exact", "compatible": "stale", "miss": "nearest"}
"""By how the nearest record matches; 'miss' where there is none."""
KEPT_DAYS = 400
MOST_KINDS = 2000
"""Different lookups that are counted between two times that they are written."""
MOST_DEVICE = 100


class Counted(NamedTuple):
    """What is counted together; see `schema.Lookup`."""

    day: int
    device: str
    place: str
    model: str
    outcome: str


class Lookups:
    """Of one server, since they were last written."""

    def __init__(self) -> None:
        self._counts: Counter[Counted] = Counter()
        self._lock = threading.Lock()

    def count(self, question: Question, found: Found) -> None:
        """Count one that was asked for a device, as scripts do, and lists and tunings do not."""
        device = str(question.wanted.get("device.name", ""))[:MOST_DEVICE]
        if not device or question.family is not None or question.command:
            return
        outcome = OUTCOMES[found.kind] if found.place else "miss"
        day = int(time.time() // DAY_S)
        kept = Counted(day, device, found.place, question.model[:12], outcome)
        with self._lock:
            if kept in self._counts or len(self._counts) < MOST_KINDS:
                self._counts[kept] += 1

    def flush(self, database: Database) -> None:
        """Write them.

        Raises:
            StoreError: the database takes nothing; they are written the next time.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
        written = False
        try:
            with database.writing() as session:
                _add(session, counts)
            written = True
        finally:
            if not written:
                with self._lock:
                    self._counts.update(counts)


def _add(session: Session, counts: Mapping[Counted, int]) -> None:
    """In one statement: while thousands are made, no lookup is answered."""
    kind = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    table = Lookup.__table__
    added = kind.insert(table)
    more = table.c.count + added.excluded.count
    keys = [column.name for column in table.primary_key]
    # In one order: servers wait for each other's rows.
    rows = [one._asdict() | {"count": counts[one]} for one in sorted(counts)]
    if rows:
        statement = added.on_conflict_do_update(index_elements=keys, set_={"count": more})
        session.connection().execute(statement, rows)


def tidy(session: Session) -> None:
    """Forget those of long ago."""
    session.execute(delete(Lookup).where(Lookup.day < int(time.time() // DAY_S) - KEPT_DAYS))
