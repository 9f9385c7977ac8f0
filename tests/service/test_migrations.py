"""Migrations bring an empty or older database to this version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from advisor.errors import StoreError
from advisor.service import migrations
from advisor.service.database import Database
from advisor.service.schema import Base

FOLDER = Path(migrations.__file__).parent
STEP = """
from alembic import op
import sqlalchemy as sa

revision, down_revision = "0002", "0001"


def upgrade():
    op.add_column("jobs", sa.Column("note", sa.String(), nullable=True))
    op.execute("{then}")
"""


def tables(database: Database) -> dict[str, set[str]]:
    """Column names by table."""
    with database.reading() as session:
        found = inspect(session.connection())
        return {
            name: {one["name"] for one in found.get_columns(name)}
            for name in found.get_table_names()
        }


def test_migrations_are_numbered_and_import_nothing_of_advisor() -> None:
    """So a migration does the same after the code has changed."""
    steps = [step.revision for step in ScriptDirectory(str(FOLDER)).walk_revisions()]
    assert steps == [f"{number:04}" for number in range(len(steps), 0, -1)]
    for step in FOLDER.glob("versions/*.py"):
        assert "advisor" not in step.read_text(), step


def test_an_older_database_gets_all_missing_migrations_or_none(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of the older version then refuses the database."""
    database = Database(database_url)
    database.start(lambda _session: None)
    assert tables(database).keys() == {*Base.metadata.tables, "alembic_version"}
    folder = shutil.copytree(FOLDER, tmp_path / "migrations")
    step = folder / "versions" / "v0002_note.py"
    with monkeypatch.context() as patched:
        patched.setattr(migrations, "__file__", str(folder / "__init__.py"))
        step.write_text(STEP.format(then="SELECT * FROM nowhere"))
        with pytest.raises(StoreError, match="nowhere"):
            database.start(lambda _session: None)
        assert "note" not in tables(database)["jobs"]
        step.write_text(STEP.format(then="SELECT 1"))
        database.start(lambda _session: pytest.fail("it was not empty"))
        assert "note" in tables(database)["jobs"]
    with pytest.raises(StoreError, match=r"schema 2 is newer than 1, .*upgrade") as caught:
        database.start(lambda _session: None)
    assert "s3cret" not in str(caught.value)
    database.close()
