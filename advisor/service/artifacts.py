"""Artifacts in the database: bytes that this server cannot read. Only those whose keys signed them
load them."""

from __future__ import annotations

import time

from sqlalchemy import delete as removing
from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from advisor.cache.artifacts import Label
from advisor.errors import UsageError
from advisor.service import quotas
from advisor.service.database import DAY_S
from advisor.service.schema import Artifacts, Item
from advisor.service.tokens import Caller, note

MOST_LISTED = 10_000
"""On one page."""
KEPT_S = DAY_S
"""Without a record: it may be on its way."""


def sizes(
    session: Session, after: str, start: str = "", most: int = MOST_LISTED
) -> tuple[dict[str, int], bool]:
    """Bytes of each behind a name, of names that begin so, and whether there are more."""
    query = select(Artifacts.name, Artifacts.size).where(Artifacts.name > after)
    if start:
        query = query.where(Artifacts.name.startswith(start, autoescape=True))
    found = session.execute(query.order_by(Artifacts.name).limit(most + 1)).all()
    return {name: size for name, size in found[:most]}, len(found) > most


def data_of(session: Session, name: str) -> bytes | None:
    """What is under a name; None for nothing."""
    return session.scalar(select(Artifacts.data).where(Artifacts.name == name))


def put(session: Session, name: str, data: bytes, by: Caller) -> bool:
    """Keep artifacts, in place of what has their name; whether nothing had.

    Raises:
        UsageError: the name is invalid, or they are beyond the token's quota.
        PermissionError: another token put there what has their name.
    """
    label = Label.parse(name)
    if label is None:
        raise UsageError(f"artifacts {name[:80]!r}: expected a name of artifacts")
    there = session.get(Artifacts, name)
    if there is not None:
        by.check_owns(there.token)
    quotas.check(session, Artifacts, by, len(data) - (there.size if there else 0))
    kept = there or Artifacts(name=name, record_key=label.record_key)
    kept.data, kept.size, kept.token, kept.stored = data, len(data), by.token, time.time()
    session.add(kept)
    note(session, by, "artifacts put", name)
    return there is None


def delete(session: Session, name: str, by: Caller) -> bool:
    """Remove what is under a name, if it is the caller's; whether it was there."""
    found = session.get(Artifacts, name)
    if found is None:
        return False
    by.check_owns(found.token)
    session.delete(found)
    note(session, by, "artifacts deleted", name)
    return True


def tidy(session: Session) -> None:
    """Remove those whose record is gone."""
    alone = ~exists().where(Item.record_key == Artifacts.record_key)
    old = Artifacts.stored < time.time() - KEPT_S
    session.execute(removing(Artifacts).where(old, alone))
