"""What strangers and broken clients send: a fuzzer over the API's own description, and sockets
that are slow, silent or gone."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from advisor.service.access import Guesses
from advisor.service.routes.parsing import MAX_LARGE
from tests.service.serving import Served, fresh
from tests.service.test_access import filled

CONFIG = Path(__file__).with_name("schemathesis.toml")


@pytest.mark.long
@pytest.mark.parametrize("role", ["admin", "read", ""])
def test_whatever_is_sent_is_answered_as_described(running_lite: Served, role: str) -> None:
    """No fault of the server's, and every status, media type and body one that OpenAPI names. What
    longer runs gave is in benchmarks/results/service.md."""
    fresh(running_lite)
    running_lite.service.guesses = Guesses(most=10**6)
    said = attacked(running_lite, role, "--max-examples", "2")
    assert said.returncode == 0, said.stdout[-5000:]
    if role:
        assert running_lite.ask("GET", "/api/self", role).status == 200


def attacked(served: Served, role: str, *words: str) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{served.port}/openapi.json"
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", url]
    token = ["-H", f"Authorization: Bearer {served.tokens[role]}"] if role else []
    return subprocess.run([*program, "--no-color", *token, *words], capture_output=True, text=True)


INJECTED = (
    "' OR '1'='1'; DROP TABLE items; --",
    "0) UNION SELECT digest FROM tokens --",
    "../../../../etc/passwd",
    "file:///etc/passwd\0.msgpack",
    "{{7*7}}${7*7}%s%n",
    "x\r\nSet-Cookie: a=b\ud7ff\u202e",
    "9" * 400,
)


def test_nothing_that_is_sent_is_run_or_opened(team: Served) -> None:
    """In each parameter and each field of a body that OpenAPI names: refused, or taken as text."""
    jobs_before = team.ask("POST", "/api/jobs", "submit", {"command": ["train"]}).json["id"]
    described = team.ask("GET", "/openapi.json").json
    asked = 0
    for path, operations in described["paths"].items():
        if path == "/api/tokens/{number}":
            continue
        for (method, operation), text in itertools.product(operations.items(), INJECTED):
            for where, query, body in injected(path, operation, described, text):
                answer = team.ask(method.upper(), f"{where}{query}", "admin", body)
                asked += 1
                assert answer.status in (200, 201, 401, 403, 404, 405, 409, 422), (method, where)
                assert "set-cookie" not in answer.headers
                for leak in (b"root:", b"sqlite", b"psycopg", b"SELECT digest", b"Traceback"):
                    assert leak not in answer.data.replace(text.encode(), b""), answer.data
    assert asked > 200
    assert len(team.ask("GET", "/api/tokens", "admin").json["tokens"]) == len(team.tokens)
    assert team.ask("GET", f"/api/jobs/{jobs_before}", "read").status == 200


def injected(
    path: str, operation: Any, described: Any, text: str
) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Path, query and body, with the text in one of them."""
    if "{" in path:
        yield re.sub(r"\{.*?\}", quote(text, ""), path), "", None
        yield re.sub(r"\{.*?\}", quote(text, "/."), path), "", None
    for one in operation.get("parameters", []):
        if one["in"] == "query":
            yield filled(path), f"?{urlencode({one['name']: text})}", None
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = body.get("schema", {})
    named = schema.get("$ref", "").rpartition("/")[2]
    for field in described["components"]["schemas"].get(named, schema).get("properties", {}):
        yield filled(path), "", {field: text}
        yield filled(path), "", {field: [text], "command": ["x"]}


BROKEN = {
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 10**6: 400,
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 10**5: 400,
    b"GET /" + b"x" * 10**6: 400,
    b"\x16\x03\x01\x02\x00": 400,
    b"PUT Content-Length: -1\r\n\r\n": 400,
    b"PUT Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345": 400,
    b"PUT Transfer-Encoding: chunked\r\n\r\nzz\r\n": 400,
    b"PUT Content-Length: 10000000000\r\n\r\n" + bytes(2**21): 413,
}


def test_a_server_outlives_broken_clients(served_lite: Served) -> None:
    """What is too large is refused; who hangs up leaves nothing behind."""
    address, token = ("127.0.0.1", served_lite.port), served_lite.tokens["worker"]
    head = f"PUT {filled('/api/artifacts/{label}')} HTTP/1.1\r\nHost: x\r\n"
    put = f"{head}Authorization: Bearer {token}\r\n".encode()
    for data, status in BROKEN.items():
        assert said_to(address, data.replace(b"PUT ", put)) == status, data[:200]
    for _ in range(5 * MAX_LARGE):
        with socket.create_connection(address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(put + b"Content-Length: 1000000\r\n\r\nhalf")
    assert said_to(address, put + b"Content-Length: 1000000\r\n\r\n" + bytes(10**6)) == 201


def said_to(address: tuple[str, int], data: bytes) -> int:
    """The status of the answer, also where it comes before all was sent."""
    with socket.create_connection(address, timeout=60) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
        return int(client.recv(2**12).split()[1])
