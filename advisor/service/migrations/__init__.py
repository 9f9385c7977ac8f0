"""Makes the tables of a new database from `schema`, and upgrades an older database with Alembic:
each file in `versions` is one step."""

from __future__ import annotations

from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from advisor.service.schema import Base


def upgrade(connection: Connection) -> bool:
    """Make or upgrade the tables, in the connection's transaction. Returns whether there were none.
    Raises SQLAlchemyError if a newer advisor made them."""
    context = MigrationContext.configure(connection)
    steps = ScriptDirectory(str(Path(__file__).parent))
    revision, last = context.get_current_revision(), str(steps.get_current_head())
    if revision is None:
        Base.metadata.create_all(connection)
        context.stamp(steps, last)
        return True
    if revision > last:
        newer = f"schema {int(revision)} is newer than {int(last)}, which this version knows"
        raise SQLAlchemyError(f"{newer}; upgrade advisor")
    with Operations.context(context):
        for step in reversed(list(steps.iterate_revisions(last, revision))):
            step.module.upgrade()
            context.stamp(steps, step.revision)
    return False
