"""Records on a server: what is kept, what is refused, what a lookup is told."""

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
from tests.service.serving import Answer, Served, actions, serving

OURS, TEAM = KeyRing(own=b"k" * 32), KeyRing(secret=b"s" * 32)
WHOLE = to_plain(fields(KEY))


def named(one: Record, keyring: KeyRing = NO_KEYS) -> tuple[str, bytes]:
    data = encode(one, keyring)
    return Name.of(one, data, keyring).text, data


def put(served: Served, key: str, data: bytes, role: str = "worker") -> Answer:
    return served.ask("PUT", f"/api/records/{quote(key)}", role, data)


def keys(served: Served) -> list[str]:
    found: list[str] = served.ask("GET", "/api/records", "read").json["keys"]
    return found


def items(answer: Answer) -> dict[str, bytes | None]:
    assert answer.status == 200, answer.data
    return dict(msgpack.unpackb(answer.data)["items"])


def look(served: Served, headers: Any = None, **question: Any) -> Answer:
    asked = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in question.items()}
    path = f"/api/lookup?{urlencode(asked, doseq=True)}"
    return served.ask("GET", path, "read", headers=headers)


def test_a_record_is_kept_once_and_removed_by_its_writer(served: Served) -> None:
    key, data = named(record(), OURS)
    place = f"/api/records/{quote(key)}"
    assert put(served, key, data, "admin").status == 201
    assert put(served, key, data).json == {"outcome": "known"}
    assert keys(served) == [key]
    assert items(served.ask("POST", "/api/records", "read", {"keys": [key]})) == {key: data}
    assert served.ask("DELETE", place, "worker").status == 403
    assert served.ask("DELETE", place, "admin").json == {"deleted": True}
    assert served.ask("DELETE", place, "admin").status == 404
    put(served, key, data, "worker")
    assert served.ask("DELETE", place, "worker").status == 200
    assert actions(served)[:4] == ["records deleted", "put"] * 2


def hostile() -> dict[str, tuple[str, bytes]]:
    key, data = named(record())
    other, more = named(record(created=1.72e9))
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


def test_hostile_records_are_refused(served_lite: Served) -> None:
    for what, (key, data) in hostile().items():
        answer = put(served_lite, key, data)
        assert answer.status == 422 and "\n" not in answer.json["detail"], what
    for method, odd in itertools.product(("PUT", "DELETE"), ("record/../x", "%2e%2e/x")):
        answer = served_lite.ask(method, f"/api/records/{odd}", "admin", b"x")
        assert answer.status in (404, 422), (method, odd)
    assert keys(served_lite) == [] and "put" not in actions(served_lite)


def test_mutated_records_are_refused_or_records(served_lite: Served) -> None:
    good = {Name.of(record(), data).text: data for data in corpus()[:1]}
    for data in itertools.islice(mutated(corpus(), random.Random(7)), 30):
        key = Name.of(record(), data).text
        status = put(served_lite, key, data).status
        assert status in (201, 422)
        if status == 201:
            assert decode(data)
            good[key] = data
    assert set(keys(served_lite)) <= good.keys()


def test_what_a_team_did_not_sign_is_refused_where_that_is_asked_for(lite: str) -> None:
    with serving(lite, keyring=replace(TEAM, required=True)) as served:
        for keyring, status in ((NO_KEYS, 422), (OURS, 422), (TEAM, 201)):
            assert put(served, *named(record(), keyring)).status == status


def test_odd_questions(served_lite: Served) -> None:
    for question, status in (
        ({"file": "'; DROP TABLE items; --"}, 200),
        *(({"file": odd}, 422) for odd in ("\0", "\x1b[2J", "a" * 5000)),
        ({"id": "' OR 1=1"}, 422),
        ({"file": "x", "wanted": "[" * 9999}, 422),
        ({"wanted": '["x"]'}, 422),
        ({"wanted": {"device.name": ["x"]}}, 422),
        ({"wanted": {"mode": "train"}}, 422),  # of all records
        ({"file": "x", "wanted": {"model": {"a": [1, None, {}]}}}, 200),
        ({"family": "", "wanted": WHOLE}, 200),
        ({"family": "", "wanted": {}}, 422),
        ({"family": "", "wanted": {k: v for k, v in WHOLE.items() if k != "hooks"}}, 422),
        *(
            ({"family": "", "wanted": WHOLE | {"shapes": shapes}}, 422)
            for shapes in ([], [0, 3], [["3"], 3], 3)
        ),
    ):
        assert look(served_lite, **question).status == status, question


def test_a_lookup_is_narrowed(served: Served) -> None:
    one = record()
    other = record(key=changed(KEY, "model", "cd" * 32), name="other.py:Net")
    run = replace(other.key.task, command=("python", "train.py", "--epochs", "90"))
    target = replace(other.target, origin="fedcba98")
    other = replace(other, target=target, key=replace(other.key, task=run))
    (first, _), (second, data) = named(one), named(other)
    assert [put(served, *named(each)).status for each in (one, other)] == [201, 201]
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
        assert sorted(items(look(served, **question))) == sorted(found), question
    versions = [named(record(key=other.key, name=n)) for n in ("other.py:Net", "b.py:Net")]
    for each in versions:
        put(served, *each)
    assert items(look(served, file="b.py")) == {second: data, **dict(versions)}, "every version"


def test_many_of_a_name_cost_no_more(served_lite: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that fit come, or some of the nearest, however many there are."""
    monkeypatch.setattr(records, "MAX_RECORDS", 9)
    for number in range(10):
        one = record(key=changed(KEY, "model", f"{number:064x}"), created=1.7e9 + number, trials=0)
        one = replace(one, target=replace(one.target, code=f"{number:02x}"))
        put(served_lite, *named(one))
    wanted = to_plain(Query(environment=ENVIRONMENT).stated)
    asked = {"target": text_digest("model.py:Net"), "wanted": wanted}
    (mine,) = items(look(served_lite, **asked, code="03"))
    assert f"/{3:064x}"[:13] in mine
    for question, number in (
        (asked | {"code": "ff"}, records.MAX_NEAREST),  # of none is the code this one
        (asked | {"wanted": WHOLE | {"mode": "infer"}}, records.MAX_NEAREST),
        (asked, records.MAX_RECORDS),
    ):
        assert len(items(look(served_lite, **question))) == number


def test_records_of_older_versions(served_lite: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a client that knows the field, and by one that does not."""
    put(served_lite, *named(record()))
    for module in (key_of, match):
        monkeypatch.setattr(module, "PLACE", (*PLACE, "flavour"))
    monkeypatch.setitem(key_of.ADDED, "flavour", "plain")
    records._fields.cache_clear()
    for wanted in (WHOLE, WHOLE | {"flavour": "plain"}):
        for question in ({"model": KEY.model}, {"family": ""}):
            assert len(items(look(served_lite, **question, wanted=wanted))) == 1
    records._fields.cache_clear()


HEAD = "PUT /api/records/record/0 HTTP/1.1\r\nHost: x\r\n"


def test_a_large_body_is_refused_before_it_comes(served_lite: Served) -> None:
    """Without a valid token: many of them filled the server's memory."""
    address, keys = ("127.0.0.1", served_lite.port), ["record/0"] * 65
    assert served_lite.ask("POST", "/api/records", "read", {"keys": keys}).status == 422
    assert served_lite.ask("POST", "/api/records", "read", b"[" * 10_000).status == 422
    for token, body, status in (
        ("worker", "Content-Length: 1048577", 413),
        ("", "Content-Length: 1048577", 413),
        ("", "Content-Length: 1048576", 401),
        ("", "Transfer-Encoding: chunked", 401),
        ("adv_guessed", "Transfer-Encoding: chunked", 401),
        ("worker", "Transfer-Encoding: chunked", 413),
    ):
        known = served_lite.tokens.get(token, token)
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(f"{HEAD}{body}\r\nAuthorization: Bearer {known}\r\n\r\n".encode())
            if token == "worker" and "chunked" in body:
                client.sendall(b"100001\r\n" + b"x" * 0x100001 + b"\r\n0\r\n\r\n")
            assert client.recv(2**12).startswith(f"HTTP/1.1 {status}".encode()), (token, body)


def test_many_at_once_put_the_same(served: Served) -> None:
    key, data = named(record())
    with ThreadPoolExecutor(12) as threads:
        said = list(threads.map(lambda _: put(served, key, data).status, range(12)))
    assert sorted(said) == [200] * 11 + [201]
    assert actions(served).count("put") == 1


def test_metrics_headers_and_a_database_that_is_away(lite: str) -> None:
    with serving(lite) as served:
        put(served, *named(record()))
        packed = look(served, model=KEY.model, headers={"Accept-Encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip"
        for path in ("/healthz", "/nowhere/at/all", "/api/self"):
            said = served.ask("GET", path).headers
            assert said["content-security-policy"].startswith("default-src 'none'")
            assert said["x-content-type-options"] == "nosniff"
            assert said["cache-control"] == "no-store"
        metrics = served.ask("GET", "/metrics", "read").data.decode()
        assert "advisor_records 1.0" in metrics and "nowhere" not in metrics
        assert 'route="/api/records/{key:path}",status="201"} 1.0' in metrics
        assert 'advisor_jobs{state="queued"} 0.0' in metrics
        served.database.write(Session.execute, text("ALTER TABLE records RENAME TO elsewhere"))
        answer = served.ask("GET", "/api/records", "read")
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    assert answer.json == {"detail": "the server's database does not answer"}


ONE = f"{record_key(record()).replace('/', '-')}-{'ef' * 6}.{'09' * 6}"
ALONE = f"{'ab' * 6}-{'cd' * 6}-1-{'ef' * 6}.{'09' * 6}"
LARGE = b"\0" * 2**21


def send(served: Served, data: bytes, role: str = "worker", name: str = ONE) -> Answer:
    return served.ask("PUT", f"/api/artifacts/{name}", role, data)


def sizes(served: Served, **query: str) -> dict[str, int]:
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    answer = served.ask("GET", f"/api/artifacts?{asked}", "read").json
    assert answer["more"] is False
    found: dict[str, int] = answer["sizes"]
    return found


def test_they_are_kept_replaced_and_removed_by_their_owner(served: Served) -> None:
    place = f"/api/artifacts/{ONE}"
    assert send(served, b"before").status == 201
    assert send(served, LARGE).json == {"outcome": "replaced"}
    assert served.ask("GET", place, "read").data == LARGE
    assert sizes(served) == sizes(served, start=ONE[:-12]) == {ONE: len(LARGE)}
    assert sizes(served, after=ONE) == sizes(served, start=ALONE[:-12]) == {}
    assert sizes(served, start="-") == {}
    assert served.ask("GET", "/api/artifacts?start=%25", "read").status == 422
    assert send(served, b"the admin's", "admin").status == 200
    refused = send(served, b"a worker's")
    assert refused.status == 403 and "another token stored it" in refused.json["detail"]
    assert served.ask("DELETE", place, "worker").status == 403  # another's by now
    assert served.ask("GET", place, "read").data == b"the admin's"
    assert served.ask("DELETE", place, "admin").status == 200
    assert served.ask("GET", place, "read").status == 404 and sizes(served) == {}
    assert served.ask("DELETE", place, "admin").status == 404
    assert actions(served)[0] == "artifacts deleted"
    assert [send(served, b"a worker's").status for _ in range(2)] == [201, 200]


def test_large_bodies_wait_for_each_other(served_lite: Served) -> None:
    """Refused ones too, or none would come any more."""
    for data, status in ((b"", 400), (bytes(settings.MAX_ARTIFACTS + 1), 413)):
        assert {send(served_lite, data).status for _ in range(MAX_LARGE)} == {status}
    names = [f"{ONE[:-1]}{n}" for n in range(2 * MAX_LARGE)]
    with ThreadPoolExecutor(len(names)) as several:
        sent = several.map(lambda name: send(served_lite, LARGE, name=name).status, names)
        assert set(sent) == {201}


def test_they_go_a_day_after_their_record(served: Served) -> None:
    put(served, *named(record()))
    for name in (ONE, ALONE):
        send(served, b"code", name=name)
    for kept in ({ONE: 4, ALONE: 4}, {ONE: 4}):
        served.database.write(blobs.tidy)
        assert sizes(served) == kept
        served.database.write(Session.execute, update(ArtifactsRow).values(stored=0.0))
