"""An empty or older database becomes one of this version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from advisor.errors import StoreError
from advisor.service import migrations
from advisor.service.database import Database
from advisor.service.schema import Base

STEP = """
from alembic import op
import sqlalchemy as sa

revision, down_revision = "0002", "0001"


def upgrade():
    op.add_column("jobs", sa.Column("note", sa.String(), nullable=True))
    op.execute("{then}")
"""


def tables(database: Database) -> set[str]:
    with database.reading() as session:
        return set(inspect(session.connection()).get_table_names())


def test_steps_are_in_order_and_import_nothing_of_advisor() -> None:
    """What they did once they do again, whatever the code is by then."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    steps = [step.revision for step in ScriptDirectory.from_config(config).walk_revisions()]
    assert steps == [f"{number:04}" for number in range(int(migrations.LAST), 0, -1)]
    for step in Path(migrations.__file__).parent.glob("versions/*.py"):
        assert "advisor" not in step.read_text(), step


def test_an_older_database_takes_the_steps_that_it_lacks(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them or, where one fails, none; a server of the older version then refuses it."""
    database = Database(database_url)
    database.start(lambda _session: None)
    assert tables(database) == {*Base.metadata.tables, "alembic_version"}
    folder = shutil.copytree(Path(migrations.__file__).parent, tmp_path / "migrations")
    step = folder / "versions" / "v0002_note.py"
    with monkeypatch.context() as patched:
        patched.setattr(migrations, "__file__", str(folder / "__init__.py"))
        patched.setattr(migrations, "LAST", "0002")
        step.write_text(STEP.format(then="SELECT * FROM nowhere"))
        with pytest.raises(StoreError, match="nowhere"):
            database.start(lambda _session: None)
        with database.reading() as session:
            assert session.scalar(text("SELECT version_num FROM alembic_version")) == "0001"
        step.write_text(STEP.format(then="SELECT 1"))
        database.start(lambda _session: pytest.fail("it was not empty"))
        with database.reading() as session:
            assert "note" in {c["name"] for c in inspect(session.connection()).get_columns("jobs")}
    with pytest.raises(StoreError, match=r"schema 2 is newer than 1, .*upgrade") as caught:
        database.start(lambda _session: None)
    assert "s3cret" not in str(caught.value)
    database.close()
