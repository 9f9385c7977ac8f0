"""Fixtures: servers on SQLite and, where it is installed, on a real PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from advisor.cache.stores.http_client import HttpClient
from tests.cache import servers
from tests.service.serving import LiveServer, reset, serving


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.Server]:
    with servers.postgresql() as server:
        yield server


def new_database(server: servers.Server) -> str:
    """Create an empty database and return its URL."""
    name = f"t{uuid.uuid4().hex}"
    place = f"//advisor:s3cret@127.0.0.1:{server.port}"
    with psycopg.connect(f"postgresql:{place}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql+psycopg:{place}/{name}"


@pytest.fixture
def postgresql_url(postgresql: servers.Server) -> str:
    return new_database(postgresql)


@pytest.fixture
def sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of an empty SQLite database."""
    return f"sqlite:///{tmp_path_factory.mktemp('database')}/service.db"


@pytest.fixture(params=["sqlite_url", "postgresql_url"])
def database_url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def shared_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(f"sqlite:///{tmp_path_factory.mktemp('database')}/service.db") as found:
        yield found


@pytest.fixture(scope="session")
def shared_postgresql(postgresql: servers.Server) -> Iterator[LiveServer]:
    with serving(new_database(postgresql)) as found:
        yield found


@pytest.fixture(params=["shared_sqlite", "shared_postgresql"])
def server(request: pytest.FixtureRequest) -> LiveServer:
    """A server whose database holds only one token per role."""
    found: LiveServer = request.getfixturevalue(request.param)
    reset(found)
    return found


@pytest.fixture
def sqlite_server(shared_sqlite: LiveServer) -> LiveServer:
    reset(shared_sqlite)
    return shared_sqlite


@pytest.fixture
def remote(
    sqlite_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LiveServer:
    """A server that ADVISOR_CACHE names; ADVISOR_TOKEN has the submit role."""
    monkeypatch.setenv("ADVISOR_TOKEN", sqlite_server.tokens["submit"])
    monkeypatch.setenv("ADVISOR_CACHE", sqlite_server.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nobodys"))
    return sqlite_server


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists each HTTP request as "METHOD /path"."""
    seen: list[str] = []
    request = HttpClient.request

    def record_request(self: HttpClient, method: str, path: str, **more: Any) -> Any:
        seen.append(f"{method} {path.partition('?')[0]}")
        return request(self, method, path, **more)

    monkeypatch.setattr(HttpClient, "request", record_request)
    return seen
