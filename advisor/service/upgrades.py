"""Makes the tables of a new database from `schema`, and upgrades those of an older one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import inspect, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from advisor.service.schema import Base, Version

STEPS: Sequence[Callable[[Session], object]] = ()
"""The first changes the tables of version 0, and so on. A released step never changes, so it
imports nothing of advisor."""


def upgrade(session: Session) -> bool:
    """Make or upgrade the tables, in the session's transaction. Returns whether there were none.
    Raises SQLAlchemyError if a newer advisor made them."""
    if not inspect(session.connection()).has_table(Version.__tablename__):
        Base.metadata.create_all(session.connection())
        session.add(Version(number=len(STEPS)))
        return True
    found = session.scalars(select(Version)).one()
    if found.number > len(STEPS):
        newer = f"schema {found.number} is newer than {len(STEPS)}, which this version knows"
        raise SQLAlchemyError(f"{newer}; upgrade advisor")
    for step in STEPS[found.number :]:
        step(session)
    found.number = len(STEPS)
    return False
