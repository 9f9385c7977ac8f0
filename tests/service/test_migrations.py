"""An empty or older database becomes one of this version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from sqlalchemy.orm import Session

from advisor.errors import StoreError
from advisor.service import attempts, jobs, migrations
from advisor.service.database import Database
from advisor.service.schema import Base
from tests.service.serving import statements


def differences(database: Database) -> list[object]:
    with database.writing() as session:
        context = MigrationContext.configure(
            session.connection(), opts={"compare_type": True, "compare_server_default": True}
        )
        found: list[object] = compare_metadata(context, Base.metadata)
    return found


def test_the_steps_make_what_the_models_say(database_url: str) -> None:
    database = Database(database_url)
    database.start(lambda _session: None)
    assert differences(database) == []
    with database.writing() as session:
        session.execute(text("DROP INDEX jobs_live"))
        session.execute(text("ALTER TABLE jobs DROP COLUMN due"))
    assert len(differences(database)) == 2  # such as there are would be seen
    database.close()


INDEXES: list[tuple[str, Callable[[Session], object]]] = [
    ("jobs_of_state", lambda session: jobs.waiting(session, 1)),
    ("attempts_of_state", attempts.running),
    ("jobs_of_record", lambda session: jobs.last_for(session, "ab" * 6 + "@64")),
]


def test_what_is_asked_often_has_an_index(lite: str) -> None:
    """By SQLite's own account: PostgreSQL's depends on how much is in its tables."""
    database = Database(lite)
    database.start(lambda _session: None)
    for index, query in INDEXES:
        with database.reading() as session:
            with statements(database) as asked:
                query(session)
            explained = [
                str(line)
                for statement, values in asked
                if statement.startswith("SELECT")
                for line in session.connection().exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {statement}", values
                )
            ]
        assert any(f"INDEX {index} " in line for line in explained), explained
    database.close()


def test_the_last_step_is_known() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    steps = [step.revision for step in ScriptDirectory.from_config(config).walk_revisions()]
    assert steps == [f"{number:04}" for number in range(int(migrations.LAST), 0, -1)]


def test_steps_import_nothing_of_advisor() -> None:
    """What they did once they do again, whatever the code is by then."""
    for step in Path(migrations.__file__).parent.glob("versions/*.py"):
        assert "advisor" not in step.read_text(), step


def test_an_upgrade_that_fails_changes_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(database_url)
    upgrade = migrations.upgrade

    def fails(connection: Connection) -> None:
        upgrade(connection)
        connection.execute(text("SELECT * FROM nowhere"))

    with monkeypatch.context() as patched:
        patched.setattr(migrations, "upgrade", fails)
        with pytest.raises(StoreError, match="nowhere"):
            database.start(lambda _session: None)
    with database.reading() as session:
        assert inspect(session.connection()).get_table_names() == []
    database.start(lambda _session: None)
    assert differences(database) == []
    database.close()
