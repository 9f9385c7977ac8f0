"""Databases to serve from: SQLite, and a real PostgreSQL where it is installed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from advisor.cache.stores.http_client import HttpClient
from tests.cache import servers
from tests.service.serving import Served, fresh, serving


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.Server]:
    with servers.postgresql() as server:
        yield server


def emptied(server: servers.Server) -> str:
    """The URL of a database with nothing in it."""
    name = f"t{uuid.uuid4().hex}"
    place = f"//advisor:s3cret@127.0.0.1:{server.port}"
    with psycopg.connect(f"postgresql:{place}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql+psycopg:{place}/{name}"


@pytest.fixture
def new_postgresql(postgresql: servers.Server) -> str:
    return emptied(postgresql)


@pytest.fixture
def lite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a database with nothing in it, of SQLite."""
    return f"sqlite:///{tmp_path_factory.mktemp('database')}/service.db"


@pytest.fixture(params=["lite", "new_postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def running_lite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that all tests of a database share."""
    with serving(f"sqlite:///{tmp_path_factory.mktemp('database')}/service.db") as found:
        yield found


@pytest.fixture(scope="session")
def running_postgresql(postgresql: servers.Server) -> Iterator[Served]:
    with serving(emptied(postgresql)) as found:
        yield found


@pytest.fixture(params=["running_lite", "running_postgresql"])
def served(request: pytest.FixtureRequest) -> Served:
    """A server with nothing in its database but a token of each role."""
    found: Served = request.getfixturevalue(request.param)
    fresh(found)
    return found


@pytest.fixture
def served_lite(running_lite: Served) -> Served:
    """As `served`, where one database is enough."""
    fresh(running_lite)
    return running_lite


@pytest.fixture
def team(served_lite: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """It is the store here, with a token that may submit."""
    monkeypatch.setenv("ADVISOR_TOKEN", served_lite.tokens["submit"])
    monkeypatch.setenv("ADVISOR_CACHE", served_lite.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nobodys"))
    return served_lite


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a server."""
    seen: list[str] = []
    request = HttpClient.request

    def told(self: HttpClient, method: str, path: str, **more: Any) -> Any:
        seen.append(f"{method} {path.partition('?')[0]}")
        return request(self, method, path, **more)

    monkeypatch.setattr(HttpClient, "request", told)
    return seen
