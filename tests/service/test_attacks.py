"""Hostile and broken clients: a fuzzer driven by the OpenAPI schema, and raw sockets."""

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
from tests.service.serving import LiveServer, reset
from tests.service.test_access import fill_in

CONFIG = Path(__file__).with_name("schemathesis.toml")


@pytest.mark.long
@pytest.mark.parametrize("role", ["admin", "read", ""])
def test_fuzzed_requests_get_the_answers_that_openapi_documents(
    shared_sqlite: LiveServer, role: str
) -> None:
    """No 5xx, and each status, media type and body matches the schema. Results of longer runs:
    benchmarks/results/service.md."""
    reset(shared_sqlite)
    shared_sqlite.service.guesses = Guesses(most=10**6)
    result = fuzz(shared_sqlite, role, "--max-examples", "2")
    assert result.returncode == 0, result.stdout[-5000:]
    if role:
        assert shared_sqlite.ask("GET", "/api/self", role).status == 200


def fuzz(server: LiveServer, role: str, *words: str) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{server.port}/openapi.json"
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", url]
    token = ["-H", f"Authorization: Bearer {server.tokens[role]}"] if role else []
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


def test_injected_text_is_never_executed_or_opened(remote: LiveServer) -> None:
    """Each parameter and body field in the schema refuses the text or treats it as plain text."""
    jobs_before = remote.ask("POST", "/api/jobs", "submit", {"command": ["train"]}).json["id"]
    schema = remote.ask("GET", "/openapi.json").json
    request_count = 0
    for path, operations in schema["paths"].items():
        if path == "/api/tokens/{number}":
            continue
        for (method, operation), text in itertools.product(operations.items(), INJECTED):
            for where, query, body in injections(path, operation, schema, text):
                answer = remote.ask(method.upper(), f"{where}{query}", "admin", body)
                request_count += 1
                assert answer.status in (200, 201, 401, 403, 404, 405, 409, 422), (method, where)
                assert "set-cookie" not in answer.headers
                for leak in (b"root:", b"sqlite", b"psycopg", b"SELECT digest", b"Traceback"):
                    assert leak not in answer.data.replace(text.encode(), b""), answer.data
    assert request_count > 200
    assert len(remote.ask("GET", "/api/tokens", "admin").json["tokens"]) == len(remote.tokens)
    assert remote.ask("GET", f"/api/jobs/{jobs_before}", "read").status == 200


def injections(
    path: str, operation: Any, schema: Any, text: str
) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yields path, query and body, with the text in one of them."""
    if "{" in path:
        yield re.sub(r"\{.*?\}", quote(text, ""), path), "", None
        yield re.sub(r"\{.*?\}", quote(text, "/."), path), "", None
    for one in operation.get("parameters", []):
        if one["in"] == "query":
            yield fill_in(path), f"?{urlencode({one['name']: text})}", None
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    body_schema = body.get("schema", {})
    named = body_schema.get("$ref", "").rpartition("/")[2]
    for field in schema["components"]["schemas"].get(named, body_schema).get("properties", {}):
        yield fill_in(path), "", {field: text}
        yield fill_in(path), "", {field: [text], "command": ["x"]}


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


def test_malformed_and_aborted_requests_leave_the_server_working(sqlite_server: LiveServer) -> None:
    address, token = ("127.0.0.1", sqlite_server.port), sqlite_server.tokens["worker"]
    head = f"PUT {fill_in('/api/artifacts/{label}')} HTTP/1.1\r\nHost: x\r\n"
    put = f"{head}Authorization: Bearer {token}\r\n".encode()
    for data, status in BROKEN.items():
        assert status_of(address, data.replace(b"PUT ", put)) == status, data[:200]
    for _ in range(5 * MAX_LARGE):
        with socket.create_connection(address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(put + b"Content-Length: 1000000\r\n\r\nhalf")
    assert status_of(address, put + b"Content-Length: 1000000\r\n\r\n" + bytes(10**6)) == 201


def status_of(address: tuple[str, int], data: bytes) -> int:
    """Status of the response, even if it arrives before all data is sent."""
    with socket.create_connection(address, timeout=60) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
        return int(client.recv(2**12).split()[1])
