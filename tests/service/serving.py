"""A server in a thread of the test process, and plain HTTP clients for it."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvicorn

from advisor.cache.records import Records
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.jobs.spec import JobSpec
from advisor.jobs.token import digest, made
from advisor.open_store import refusal
from advisor.service import attempts, jobs, schema, tokens
from advisor.service.access import Service
from advisor.service.app import application
from advisor.service.database import Database
from advisor.service.executors import Start
from advisor.service.run import Server
from tests.cache import servers

T = TypeVar("T")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def ask(
    port: int,
    method: str,
    path: str,
    token: str = "",
    body: bytes | dict[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    sent = dict(headers or {})
    if token:
        sent["Authorization"] = f"Bearer {token}"
    if isinstance(body, dict):
        body, sent["Content-Type"] = json.dumps(body).encode(), "application/json"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, received, response.read())
    finally:
        connection.close()


Respond = Callable[[str], tuple[int, dict[str, str], bytes]]


@contextlib.contextmanager
def fake_server(answer: Respond, sent: list[tuple[str, bytes]] | None = None) -> Iterator[str]:
    """Run a fake server and yield its URL. `answer` maps a path to a response; `sent` collects the
    token and the body of each request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if sent is not None:
                sent.append((self.headers.get("Authorization", "none"), body))
            status, headers, data = answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class LiveServer:
    """`tokens` has one per role; `stopping` is set when the server begins to shut down."""

    port: int
    service: Service
    server: Server
    stopping: threading.Event
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def database(self) -> Database:
        return self.service.database

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}?timeout=20s"

    def ask(self, method: str, path: str, role: str = "", *more: Any, **how: Any) -> Answer:
        return ask(self.port, method, path, self.tokens[role] if role else "", *more, **how)


def token(database: Database, role: str, expires: float | None = None) -> str:
    return database.write(tokens.make, f"a {role}", role, expires, None)[1]


def events(server: LiveServer) -> list[dict[str, Any]]:
    """Audit log, newest first."""
    found: list[dict[str, Any]] = server.ask("GET", "/api/audit", "admin").json["events"]
    return found


def actions(server: LiveServer) -> list[str]:
    return [one["action"] for one in events(server)]


def caller(server: LiveServer, role: str) -> tokens.Caller:
    """The caller that the token of a role identifies."""
    found = server.database.read(tokens.find, server.tokens[role], "")
    assert found is not None
    return found


def revoke(server: LiveServer, role: str) -> None:
    """Revoke the token of a role, as its owner."""
    one = caller(server, role)
    assert server.database.write(jobs.revoke_token, one.token, one)


def begun(database: Database, one: Start) -> str:
    """Begin an attempt: exchange its start token for a token of its own, and return that."""
    own = made()
    assert database.write(attempts.begin, one.attempt, digest(own), "10.0.0.1")
    return own


def make_start(external: str = "advisor-1-1", gpu: str = "", gpus: int = 0, **asked: Any) -> Start:
    """A Start as executors get it. Its server URL is a port where nothing listens."""
    return Start(
        attempt=1,
        job=1,
        external=external,
        gpu=gpu,
        server_url=f"http://127.0.0.1:{servers.free_port()}",
        token="adv_secret-of-the-attempt",
        asked=JobSpec(command=("python", "train.py"), gpus=gpus, **asked),
    )


def reset(server: LiveServer) -> None:
    """Empty the database, make new tokens, and reset the service's in-memory state."""
    database, service = server.database, server.service
    with database.writing() as session:
        for table in reversed(schema.Base.metadata.sorted_tables):
            session.execute(table.delete())
    server.tokens = {role: token(database, role) for role in tokens.ROLES}
    began = Service(database, service.reader)
    for name in ("guesses", "behind_proxy", "lookups", "used", "loops", "machines"):
        setattr(service, name, getattr(began, name))


@contextlib.contextmanager
def serving(
    url: str, keyring: KeyRing = NO_KEYS, existing: bool = False, **tls: str
) -> Iterator[LiveServer]:
    """Run a server; `existing` keeps the database, which must exist; `tls`: uvicorn options."""
    database = Database(url)
    began: list[object] = []
    database.start(began.append)
    assert not (existing and began)
    service = Service(database, Records((), keyring, refusal))
    port = servers.free_port()
    config = uvicorn.Config(
        application(service, "1"),
        port=port,
        log_level="error",
        lifespan="off",
        proxy_headers=False,
        http="h11",
        ssl_certfile=tls.get("ssl_certfile"),
        ssl_keyfile=tls.get("ssl_keyfile"),
    )
    stopping = threading.Event()
    server = Server(config, stopping.set)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    limit = time.monotonic() + 60
    while not servers.answers(port):
        assert thread.is_alive() and time.monotonic() < limit
        time.sleep(0.01)
    try:
        found = LiveServer(port, service, server, stopping)
        if not existing:
            reset(found)
        yield found
    finally:
        server.should_exit = True
        thread.join(60)
        database.close()
