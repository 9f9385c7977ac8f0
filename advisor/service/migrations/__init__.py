"""How an older database becomes one of this version, by Alembic: one file a step.

What a step makes and what `schema` says are the same: a test compares them.
"""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect, text

LAST = "0001"
"""The last step's revision. Each is a number, the one before it plus one."""
_ONE_AT_A_TIME = threading.Lock()
"""Alembic's `op` and `context` are the module's own, whichever thread sets them."""


def revision_of(connection: Connection) -> str:
    """Of a database; '' where nothing is in it."""
    if not inspect(connection).has_table("alembic_version"):
        return ""
    return str(connection.scalar(text("SELECT version_num FROM alembic_version")))


def upgrade(connection: Connection) -> None:
    """Take the steps that a database lacks, in the connection's transaction."""
    from alembic import command  # not asked for where there is nothing to do
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with _ONE_AT_A_TIME:
        command.upgrade(config, LAST)
