"""Makes the tables of a new database, and upgrades an older database with Alembic.

A new database gets its tables from `schema`. Each file in `versions` is one step of an upgrade.
"""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from advisor.service.schema import Base

LAST = "0001"
"""The newest revision. Each step's revision is that of the step before it plus one."""
_ONE_AT_A_TIME = threading.Lock()
"""Alembic keeps its context in a module, so only one upgrade may run at a time."""


def revision_of(connection: Connection) -> str:
    """The revision of a database; '' if it is empty."""
    return MigrationContext.configure(connection).get_current_revision() or ""


def upgrade(connection: Connection) -> None:
    """Upgrade a database to revision LAST, in the connection's transaction."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _ONE_AT_A_TIME:
        if revision_of(connection):
            command.upgrade(config, LAST)
        else:
            Base.metadata.create_all(connection)
            command.stamp(config, LAST)
