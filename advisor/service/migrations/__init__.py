"""Makes the tables of a new database, and upgrades an older database with Alembic.

A new database gets its tables from `schema`. Each file in `versions` is one step of an upgrade.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from advisor.service.schema import Base

LAST = "0001"
"""The newest revision. Each step's revision is that of the step before it plus one."""


def upgrade(connection: Connection) -> bool:
    """Make or upgrade the tables, in the connection's transaction. Returns whether there were none.

    Raises:
        SQLAlchemyError: a newer advisor made the tables.
    """
    revision = MigrationContext.configure(connection).get_current_revision() or ""
    if revision > LAST:
        raise SQLAlchemyError(
            f"schema {int(revision)} is newer than {int(LAST)}, which this version knows; "
            "upgrade advisor"
        )
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    if revision:
        command.upgrade(config, LAST)
    else:
        Base.metadata.create_all(connection)
        command.stamp(config, LAST)
    return not revision
