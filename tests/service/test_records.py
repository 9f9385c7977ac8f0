"""Records and artifacts on a server: storing, refusing, looking up, deleting."""

from __future__ import annotations

import itertools
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

import msgpack
import pytest
from sqlalchemy import text, update
from sqlalchemy.orm import Session

from advisor.cache import key as key_of
from advisor.cache import match, settings
from advisor.cache.codec import decode, encode, to_plain
from advisor.cache.key import PLACE, fields
from advisor.cache.match import Query
from advisor.cache.name import Name, command_digest, record_key, text_digest
from advisor.cache.record import Record
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.service import blobs, records
from advisor.service.routes.parsing import MAX_LARGE
from advisor.service.schema import ArtifactsRow
from tests.cache.examples import ENVIRONMENT, KEY, changed, record
from tests.cache.mutations import corpus, mutated
from tests.service.serving import Answer, LiveServer, actions, serving

OURS, TEAM = KeyRing(own=b"k" * 32), KeyRing(secret=b"s" * 32)
WHOLE = to_plain(fields(KEY))


def packed(one: Record, keyring: KeyRing = NO_KEYS) -> tuple[str, bytes]:
    data = encode(one, keyring)
    return Name.of(one, data, keyring).text, data


def put(server: LiveServer, key: str, data: bytes, role: str = "worker") -> Answer:
    return server.ask("PUT", f"/api/records/{quote(key)}", role, data)


def record_keys(server: LiveServer) -> list[str]:
    found: list[str] = server.ask("GET", "/api/records", "read").json["keys"]
    return found


def items(answer: Answer) -> dict[str, bytes | None]:
    assert answer.status == 200, answer.data
    return dict(msgpack.unpackb(answer.data)["items"])


def lookup(server: LiveServer, headers: Any = None, **question: Any) -> Answer:
    asked = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in question.items()}
    path = f"/api/lookup?{urlencode(asked, doseq=True)}"
    return server.ask("GET", path, "read", headers=headers)


def test_a_record_is_stored_once_and_deleted_only_by_its_writer(server: LiveServer) -> None:
    key, data = packed(record(), OURS)
    place = f"/api/records/{quote(key)}"
    assert put(server, key, data, "admin").status == 201
    assert put(server, key, data).json == {"outcome": "known"}
    assert record_keys(server) == [key]
    assert items(server.ask("POST", "/api/records", "read", {"keys": [key]})) == {key: data}
    assert server.ask("DELETE", place, "worker").status == 403
    assert server.ask("DELETE", place, "admin").json == {"deleted": True}
    assert server.ask("DELETE", place, "admin").status == 404
    put(server, key, data, "worker")
    assert server.ask("DELETE", place, "worker").status == 200
    assert actions(server)[:4] == ["records deleted", "put"] * 2


def hostile_records() -> dict[str, tuple[str, bytes]]:
    key, data = packed(record())
    other, more = packed(record(created=1.72e9))
    wild = replace(record(), provenance=replace(record().provenance, created=1.0))
    unsound = msgpack.unpackb(data)
    unsound["record"] = b"\x80"
    return {
        "rubbish": (key, b"rubbish"),
        "nothing": (key, b""),
        "another's bytes": (key, more),
        "cut": (key, data[:-9]),
        "a bit": (key, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
        "no record": (key, msgpack.packb(unsound)),
        "a bomb": (key, b"\xdd\xff\xff\xff\xff" * 2000),
        "another key": (other.replace("/64/", "/65/"), more),
        "a key of nothing": ("record/abc", data),
        "out of its domain": (Name.of(wild, data).text, data),
        "a pickle": (key, b"cos\nsystem\n(S'true'\ntR."),
        **{odd: (odd, b"x") for odd in ("../../etc/passwd", "record/'; DROP TABLE items; --")},
    }


def test_hostile_records_are_refused(sqlite_server: LiveServer) -> None:
    for what, (key, data) in hostile_records().items():
        answer = put(sqlite_server, key, data)
        assert answer.status == 422 and "\n" not in answer.json["detail"], what
    for method, odd in itertools.product(("PUT", "DELETE"), ("record/../x", "%2e%2e/x")):
        answer = sqlite_server.ask(method, f"/api/records/{odd}", "admin", b"x")
        assert answer.status in (404, 422), (method, odd)
    assert record_keys(sqlite_server) == [] and "put" not in actions(sqlite_server)


def test_mutated_records_are_refused_or_decodable(sqlite_server: LiveServer) -> None:
    good = {Name.of(record(), data).text: data for data in corpus()[:1]}
    for data in itertools.islice(mutated(corpus(), random.Random(7)), 30):
        key = Name.of(record(), data).text
        status = put(sqlite_server, key, data).status
        assert status in (201, 422)
        if status == 201:
            assert decode(data)
            good[key] = data
    assert set(record_keys(sqlite_server)) <= good.keys()


def test_a_server_with_required_signatures_refuses_unsigned_records(sqlite_url: str) -> None:
    with serving(sqlite_url, keyring=replace(TEAM, required=True)) as server:
        for keyring, status in ((NO_KEYS, 422), (OURS, 422), (TEAM, 201)):
            assert put(server, *packed(record(), keyring)).status == status


def test_invalid_lookup_parameters_are_refused(sqlite_server: LiveServer) -> None:
    for question, status in (
        ({"file": "'; DROP TABLE items; --"}, 200),
        *(({"file": odd}, 422) for odd in ("\0", "\x1b[2J", "a" * 5000)),
        ({"id": "' OR 1=1"}, 422),
        ({"file": "x", "wanted": "[" * 9999}, 422),
        ({"wanted": '["x"]'}, 422),
        ({"wanted": {"device.name": ["x"]}}, 422),
        ({"wanted": {"mode": "train"}}, 422),  # a lookup over all records
        ({"file": "x", "wanted": {"model": {"a": [1, None, {}]}}}, 200),
        ({"family": "", "wanted": WHOLE}, 200),
        ({"family": "", "wanted": {}}, 422),
        ({"family": "", "wanted": {k: v for k, v in WHOLE.items() if k != "hooks"}}, 422),
        *(
            ({"family": "", "wanted": WHOLE | {"shapes": shapes}}, 422)
            for shapes in ([], [0, 3], [["3"], 3], 3)
        ),
    ):
        assert lookup(sqlite_server, **question).status == status, question


def test_each_lookup_parameter_filters_the_records(server: LiveServer) -> None:
    one = record()
    other = record(key=changed(KEY, "model", "cd" * 32), name="other.py:Net")
    run = replace(other.key.task, command=("python", "train.py", "--epochs", "90"))
    target = replace(other.target, origin="fedcba98")
    other = replace(other, target=target, key=replace(other.key, task=run))
    (first, _), (second, data) = packed(one), packed(other)
    assert [put(server, *packed(each)).status for each in (one, other)] == [201, 201]
    name = Name.parse(first)
    assert name is not None
    for question, found in (
        ({"model": KEY.model}, [first]),
        ({"model": "cd" * 32}, [second]),
        ({"file": "other.py"}, [second]),
        ({"target": name.target[0]}, [first]),
        ({"command": command_digest(["python", "train.py", "--epochs", "3"])}, [second]),
        ({"id": one.key.id[:4]}, [first]),
        ({"id": one.key.id, "batch": 64}, [first]),
        ({"id": one.key.id, "batch": 8}, []),
        ({}, [second, first]),
    ):
        assert sorted(items(lookup(server, **question))) == sorted(found), question
    versions = [packed(record(key=other.key, name=n)) for n in ("other.py:Net", "b.py:Net")]
    for each in versions:
        put(server, *each)
    assert items(lookup(server, file="b.py")) == {second: data, **dict(versions)}, "every version"


def test_lookup_size_is_bounded(sqlite_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns MAX_RECORDS matches, or MAX_NEAREST near misses."""
    monkeypatch.setattr(records, "MAX_RECORDS", 9)
    for number in range(10):
        one = record(key=changed(KEY, "model", f"{number:064x}"), created=1.7e9 + number, trials=0)
        one = replace(one, target=replace(one.target, code=f"{number:02x}"))
        put(sqlite_server, *packed(one))
    wanted = to_plain(Query(environment=ENVIRONMENT).stated)
    asked = {"target": text_digest("model.py:Net"), "wanted": wanted}
    (mine,) = items(lookup(sqlite_server, **asked, code="03"))
    assert f"/{3:064x}"[:13] in mine
    for question, number in (
        (asked | {"code": "ff"}, records.MAX_NEAREST),  # no record has this code
        (asked | {"wanted": WHOLE | {"mode": "infer"}}, records.MAX_NEAREST),
        (asked, records.MAX_RECORDS),
    ):
        assert len(items(lookup(sqlite_server, **question))) == number


def test_older_records_match_an_added_field_by_default(
    sqlite_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may know the field or not."""
    put(sqlite_server, *packed(record()))
    for module in (key_of, match):
        monkeypatch.setattr(module, "PLACE", (*PLACE, "flavour"))
    monkeypatch.setitem(key_of.ADDED, "flavour", "plain")
    records._fields.cache_clear()
    for wanted in (WHOLE, WHOLE | {"flavour": "plain"}):
        for question in ({"model": KEY.model}, {"family": ""}):
            assert len(items(lookup(sqlite_server, **question, wanted=wanted))) == 1
    records._fields.cache_clear()


HEAD = "PUT /api/records/record/0 HTTP/1.1\r\nHost: x\r\n"


def test_a_large_or_unauthorised_body_is_refused_unread(sqlite_server: LiveServer) -> None:
    address, keys = ("127.0.0.1", sqlite_server.port), ["record/0"] * 65
    assert sqlite_server.ask("POST", "/api/records", "read", {"keys": keys}).status == 422
    assert sqlite_server.ask("POST", "/api/records", "read", b"[" * 10_000).status == 422
    for token, body, status in (
        ("worker", "Content-Length: 1048577", 413),
        ("", "Content-Length: 1048577", 413),
        ("", "Content-Length: 1048576", 401),
        ("", "Transfer-Encoding: chunked", 401),
        ("adv_guessed", "Transfer-Encoding: chunked", 401),
        ("worker", "Transfer-Encoding: chunked", 413),
    ):
        known = sqlite_server.tokens.get(token, token)
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(f"{HEAD}{body}\r\nAuthorization: Bearer {known}\r\n\r\n".encode())
            if token == "worker" and "chunked" in body:
                client.sendall(b"100001\r\n" + b"x" * 0x100001 + b"\r\n0\r\n\r\n")
            assert client.recv(2**12).startswith(f"HTTP/1.1 {status}".encode()), (token, body)


def test_concurrent_identical_puts_store_one_record(server: LiveServer) -> None:
    key, data = packed(record())
    with ThreadPoolExecutor(12) as threads:
        statuses = list(threads.map(lambda _: put(server, key, data).status, range(12)))
    assert sorted(statuses) == [200] * 11 + [201]
    assert actions(server).count("put") == 1


def test_metrics_security_headers_and_database_outage(sqlite_url: str) -> None:
    with serving(sqlite_url) as server:
        put(server, *packed(record()))
        response = lookup(server, model=KEY.model, headers={"Accept-Encoding": "gzip"})
        assert response.headers["content-encoding"] == "gzip"
        for path in ("/healthz", "/nowhere/at/all", "/api/self"):
            headers = server.ask("GET", path).headers
            assert headers["content-security-policy"].startswith("default-src 'none'")
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
        metrics = server.ask("GET", "/metrics", "read").data.decode()
        assert "advisor_records 1.0" in metrics and "nowhere" not in metrics
        assert 'route="/api/records/{key:path}",status="201"} 1.0' in metrics
        assert 'advisor_jobs{state="queued"} 0.0' in metrics
        server.database.write(Session.execute, text("ALTER TABLE records RENAME TO elsewhere"))
        answer = server.ask("GET", "/api/records", "read")
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    assert answer.json == {"detail": "the server's database does not answer"}


ARTIFACT = f"{record_key(record()).replace('/', '-')}-{'ef' * 6}.{'09' * 6}"
ORPHAN = f"{'ab' * 6}-{'cd' * 6}-1-{'ef' * 6}.{'09' * 6}"
LARGE = b"\0" * 2**21


def upload(server: LiveServer, data: bytes, role: str = "worker", name: str = ARTIFACT) -> Answer:
    return server.ask("PUT", f"/api/artifacts/{name}", role, data)


def sizes(server: LiveServer, **query: str) -> dict[str, int]:
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    answer = server.ask("GET", f"/api/artifacts?{asked}", "read").json
    assert answer["more"] is False
    found: dict[str, int] = answer["sizes"]
    return found


def test_artifacts_are_replaced_and_deleted_only_by_their_owner(server: LiveServer) -> None:
    place = f"/api/artifacts/{ARTIFACT}"
    assert upload(server, b"before").status == 201
    assert upload(server, LARGE).json == {"outcome": "replaced"}
    assert server.ask("GET", place, "read").data == LARGE
    assert sizes(server) == sizes(server, start=ARTIFACT[:-12]) == {ARTIFACT: len(LARGE)}
    assert sizes(server, after=ARTIFACT) == sizes(server, start=ORPHAN[:-12]) == {}
    assert sizes(server, start="-") == {}
    assert server.ask("GET", "/api/artifacts?start=%25", "read").status == 422
    assert upload(server, b"the admin's", "admin").status == 200
    refused = upload(server, b"a worker's")
    assert refused.status == 403 and "another token stored it" in refused.json["detail"]
    assert server.ask("DELETE", place, "worker").status == 403  # the admin owns it now
    assert server.ask("GET", place, "read").data == b"the admin's"
    assert server.ask("DELETE", place, "admin").status == 200
    assert server.ask("GET", place, "read").status == 404 and sizes(server) == {}
    assert server.ask("DELETE", place, "admin").status == 404
    assert actions(server)[0] == "artifacts deleted"
    assert [upload(server, b"a worker's").status for _ in range(2)] == [201, 200]


def test_refused_uploads_release_their_slot(sqlite_server: LiveServer) -> None:
    for data, status in ((b"", 400), (bytes(settings.MAX_ARTIFACTS + 1), 413)):
        assert {upload(sqlite_server, data).status for _ in range(MAX_LARGE)} == {status}
    names = [f"{ARTIFACT[:-1]}{n}" for n in range(2 * MAX_LARGE)]
    with ThreadPoolExecutor(len(names)) as several:
        sent = several.map(lambda name: upload(sqlite_server, LARGE, name=name).status, names)
        assert set(sent) == {201}


def test_artifacts_without_a_record_are_removed_after_a_day(server: LiveServer) -> None:
    put(server, *packed(record()))
    for name in (ARTIFACT, ORPHAN):
        upload(server, b"code", name=name)
    for kept in ({ARTIFACT: 4, ORPHAN: 4}, {ARTIFACT: 4}):
        server.database.write(blobs.tidy)
        assert sizes(server) == kept
        server.database.write(Session.execute, update(ArtifactsRow).values(stored=0.0))
