"""An empty or older database becomes one of this version."""

from __future__ import annotations

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.orm import Session

from advisor.errors import StoreError
from advisor.service import upgrades
from advisor.service.database import Database
from advisor.service.schema import Base


def columns(database: Database) -> dict[str, set[str]]:
    """The columns of each table."""
    with database.reading() as session:
        found = inspect(session.connection())
        return {
            name: {one["name"] for one in found.get_columns(name)}
            for name in found.get_table_names()
        }


def add_note(session: Session) -> None:
    session.execute(text("ALTER TABLE jobs ADD COLUMN note VARCHAR"))


def fail(session: Session) -> None:
    session.execute(text("SELECT * FROM nowhere"))


def test_an_older_database_takes_the_steps_that_it_lacks(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them or, where one fails, none; a server of the older version then refuses it."""
    database = Database(database_url)
    database.start(lambda _session: None)
    assert columns(database).keys() == Base.metadata.tables.keys()
    with monkeypatch.context() as patched:
        patched.setattr(upgrades, "STEPS", (*upgrades.STEPS, add_note, fail))
        with pytest.raises(StoreError, match="nowhere"):
            database.start(lambda _session: None)
        assert "note" not in columns(database)["jobs"]
        patched.setattr(upgrades, "STEPS", upgrades.STEPS[:-1])
        for _ in range(2):
            database.start(lambda _session: pytest.fail("it was not empty"))
        assert "note" in columns(database)["jobs"]
    with pytest.raises(StoreError, match=r"schema \d is newer than \d, .*upgrade") as caught:
        database.start(lambda _session: None)
    assert "s3cret" not in str(caught.value)
    database.close()
