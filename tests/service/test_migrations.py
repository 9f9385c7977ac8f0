"""A database of each version before becomes one of this version, with what is in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, Table, inspect, text
from sqlalchemy.orm import Session

from advisor.cache.reader import Reader
from advisor.cache.seal import UNSEALED
from advisor.errors import StoreError
from advisor.opening import refusal
from advisor.service import attempts, coverage, jobs, migrations, records, tokens
from advisor.service.database import Database
from advisor.service.schema import Base, Item
from tests.cache.examples import KEY, record
from tests.service.serving import serving, statements
from tests.service.test_records import named

HERE = Path(__file__).parent
READER = Reader(UNSEALED, refusal)
A_RUN = replace(KEY.task, command=("python", "train.py", "--epochs", "9"))
RECORD = replace(record(key=replace(KEY, task=A_RUN)), family="f0")


@pytest.fixture
def version_1(database_url: str) -> Iterator[str]:
    """A database as the version before migrations left it: with a token and a record."""
    kind = "sqlite" if database_url.startswith("sqlite") else "postgresql"
    made = (HERE / f"version_1_{kind}.sql").read_text()
    database = Database(database_url)
    key, data = named(RECORD)
    with database.writing() as session:
        for statement in filter(None, map(str.strip, made.split(";"))):
            session.execute(text(statement))
        session.execute(text("INSERT INTO schema (id, version) VALUES (1, 1)"))
        _token, admin = tokens.make(session, "first admin", "admin", None, None)
        caller = tokens.find(session, admin, "")
        assert caller is not None
        item = records.item_of(READER, key, data)
        item.token, item.stored = caller.token, 1.8e9
        there = Table("items", MetaData(), autoload_with=session.connection())
        row = {column.name: getattr(item, column.name) for column in there.columns}
        session.execute(there.insert(), row)
    database.close()
    yield database_url


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
    ("attempts_of_started", coverage.spent),
    ("jobs_of_record", lambda session: jobs.finder(session, "ab" * 6 + "@64")),
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


def test_what_was_there_stays(version_1: str) -> None:
    began: list[object] = []
    databases = [Database(version_1) for _ in range(4)]
    threads = [threading.Thread(target=one.start, args=(began.append,)) for one in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    database = databases[0]
    assert began == [] and differences(database) == []
    with database.reading() as session:
        assert session.scalar(text("SELECT version FROM schema")) == 2  # the version before refuses
    for one in databases:
        one.close()
    key, data = named(RECORD)
    with serving(version_1, as_it_is=True) as served, served.database.reading() as session:
        assert records.data_of(session, [key]) == {key: data}
        there, item = session.get_one(Item, key), records.item_of(READER, key, data)
        for name in ("code", "family", "command", "terms"):
            assert getattr(there, name) == getattr(item, name), name
        (token,) = tokens.listed(session)
        assert token.name == "first admin" and token.created <= time.time()


def test_an_upgrade_that_fails_changes_nothing(
    version_1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(version_1)
    upgrade = migrations.upgrade

    def fails(connection: Connection, revision: str) -> None:
        upgrade(connection, revision)
        connection.execute(text("SELECT * FROM nowhere"))

    with monkeypatch.context() as patched:
        patched.setattr(migrations, "upgrade", fails)
        with pytest.raises(StoreError, match="nowhere"):
            database.start(lambda _session: None)
    with database.reading() as session:
        assert migrations.revision_of(session.connection()) == "0001"
        assert "jobs" not in inspect(session.connection()).get_table_names()
    database.start(lambda _session: None)
    assert differences(database) == []
    database.close()
