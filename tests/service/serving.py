"""A server in a thread of the test's own process, and clients of it that know no advisor."""

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
        answer = connection.getresponse()
        said = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, said, answer.read())
    finally:
        connection.close()


Answering = Callable[[str], tuple[int, dict[str, str], bytes]]


@contextlib.contextmanager
def answering(answer: Answering, sent: list[tuple[str, bytes]] | None = None) -> Iterator[str]:
    """The URL of a made-up server. `answer` gives the answer for a path; `sent` gets the token and
    the body of each request."""

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
class Served:
    """`tokens`: one of each role, by its name; `stopping`: set when the server begins to stop."""

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


def events(served: Served) -> list[dict[str, Any]]:
    """The audit log, the newest first."""
    found: list[dict[str, Any]] = served.ask("GET", "/api/audit", "admin").json["events"]
    return found


def actions(served: Served) -> list[str]:
    return [one["action"] for one in events(served)]


def caller(served: Served, role: str) -> tokens.Caller:
    """Who has the token of a role."""
    found = served.database.read(tokens.find, served.tokens[role], "")
    assert found is not None
    return found


def revoke(served: Served, role: str) -> None:
    """The token of a role, by its owner."""
    one = caller(served, role)
    assert served.database.write(jobs.revoke_token, one.token, one)


def begun(database: Database, one: Start) -> str:
    """The token for which a worker exchanges what it was started with."""
    own = made()
    assert database.write(attempts.begin, one.attempt, digest(own), "10.0.0.1")
    return own


def start_of(external: str = "advisor-1-1", gpu: str = "", gpus: int = 0, **asked: Any) -> Start:
    """What an executor starts. No server answers its worker."""
    return Start(
        attempt=1,
        job=1,
        external=external,
        gpu=gpu,
        server_url=f"http://127.0.0.1:{servers.free_port()}",
        token="adv_secret-of-the-attempt",
        asked=JobSpec(command=("python", "train.py"), gpus=gpus, **asked),
    )


def fresh(served: Served) -> None:
    """As if it was started now."""
    database, service = served.database, served.service
    with database.writing() as session:
        for table in reversed(schema.Base.metadata.sorted_tables):
            session.execute(table.delete())
    served.tokens = {role: token(database, role) for role in tokens.ROLES}
    began = Service(database, service.reader)
    for name in ("guesses", "behind_proxy", "lookups", "used", "loops", "machines"):
        setattr(service, name, getattr(began, name))


@contextlib.contextmanager
def serving(
    url: str, keyring: KeyRing = NO_KEYS, as_it_is: bool = False, **tls: str
) -> Iterator[Served]:
    """With nothing in its database, or as it is, which must be there; `tls`: as uvicorn's."""
    database = Database(url)
    began: list[object] = []
    database.start(began.append)
    assert not (as_it_is and began)
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
        found = Served(port, service, server, stopping)
        if not as_it_is:
            fresh(found)
        yield found
    finally:
        server.should_exit = True
        thread.join(60)
        database.close()
