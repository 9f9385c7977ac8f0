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
from sqlalchemy import text

from advisor.cache import key as key_of
from advisor.cache import match
from advisor.cache.codec import decode, encode, to_plain
from advisor.cache.key import PLACE, fields
from advisor.cache.match import Query
from advisor.cache.name import Name, command_digest, text_digest
from advisor.cache.record import Record
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.service import records
from tests.cache.examples import ENVIRONMENT, KEY, changed, record
from tests.cache.mutations import corpus, mutated
from tests.service.serving import Answer, Served, serving

OURS = KeyRing(own=b"k" * 32)


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
    asked = urlencode(question, doseq=True)
    return served.ask("GET", f"/api/lookup?{asked}", "read", headers=headers)


def test_what_was_put_is_there(served: Served) -> None:
    key, data = named(record(), OURS)
    assert put(served, key, data).status == 201
    assert put(served, key, data).json == {"outcome": "known"}
    assert keys(served) == [key]
    assert items(served.ask("POST", "/api/records", "read", {"keys": [key]})) == {key: data}
    said = served.ask("GET", "/api/audit", "admin").json["events"]
    assert [one["subject"] for one in said if one["action"] == "put"] == [key]


def test_a_record_is_its_writers_to_remove(served_lite: Served) -> None:
    key, data = named(record())
    place = f"/api/records/{quote(key)}"
    put(served_lite, key, data, "admin")
    assert served_lite.ask("DELETE", place, "worker").status == 403
    assert keys(served_lite) == [key]
    assert served_lite.ask("DELETE", place, "admin").json == {"deleted": True}
    assert served_lite.ask("DELETE", place, "admin").status == 404
    put(served_lite, key, data, "worker")
    assert served_lite.ask("DELETE", place, "worker").status == 200
    actions = [
        one["action"] for one in served_lite.ask("GET", "/api/audit", "admin").json["events"]
    ]
    assert actions[:4] == ["deleted", "put", "deleted", "put"]


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
    }


@pytest.mark.parametrize("what", hostile())
def test_hostile_records_are_refused(served_lite: Served, what: str) -> None:
    answer = put(served_lite, *hostile()[what])
    assert answer.status == 422 and "\n" not in answer.json["detail"]
    assert keys(served_lite) == []
    assert '"put"' not in served_lite.ask("GET", "/api/audit", "admin").data.decode()


@pytest.mark.parametrize(
    "odd", ["../../etc/passwd", "record/../x", "%2e%2e/x", "record/'; DROP TABLE items; --"]
)
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_odd_keys_reach_no_file_and_no_table(served_lite: Served, method: str, odd: str) -> None:
    answer = served_lite.ask(method, f"/api/records/{quote(odd, safe='%/')}", "admin", b"x")
    assert answer.status in (404, 422), answer.data


WHOLE = to_plain(fields(KEY))


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ({"file": "'; DROP TABLE items; --"}, 200),
        ({"file": "\0"}, 422),
        ({"file": "\x1b[2J"}, 422),
        ({"file": "a" * 5000}, 422),
        ({"id": "' OR 1=1"}, 422),
        ({"wanted": ["x"]}, 422),
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
    ],
)
def test_odd_questions(served_lite: Served, question: dict[str, Any], status: int) -> None:
    asked = {k: json.dumps(v) if k == "wanted" else v for k, v in question.items()}
    assert look(served_lite, **asked).status == status
    assert look(served_lite, file="x", wanted="[" * 9999).status == 422


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
    team = KeyRing(secret=b"s" * 32, required=True)
    with serving(lite, keyring=team) as served:
        assert put(served, *named(record())).status == 422
        assert put(served, *named(record(), OURS)).status == 422
        assert put(served, *named(record(), KeyRing(secret=b"s" * 32))).status == 201


def test_a_lookup_is_narrowed(served: Served) -> None:
    one = record()
    other = record(key=changed(KEY, "model", "cd" * 32), name="other.py:Net")
    other = replace(other, target=replace(other.target, origin="fedcba98"))
    run = replace(other.key.task, command=("python", "train.py", "--epochs", "90"))
    other = replace(other, key=replace(other.key, task=run))
    for each in (one, other):
        put(served, *named(each))
    (first, _), (second, _) = named(one), named(other)
    name, _ = Name.parse(first), Name.parse(second)
    assert name is not None
    for question, found in (
        ({"model": KEY.model}, first),
        ({"model": "cd" * 32}, second),
        ({"file": "other.py"}, second),
        ({"target": name.target[0]}, first),
        ({"origins": [name.target[1], "00" * 6]}, first),
        ({"command": command_digest(["python", "train.py", "--epochs", "3"])}, second),
        ({"id": one.key.id[:4]}, first),
        ({"id": one.key.id, "batch": 64}, first),
    ):
        assert list(items(look(served, **question))) == [found], question
    assert items(look(served, id=one.key.id, batch=8)) == {}
    assert set(items(look(served))) == {first, second}


def test_every_version_of_a_record_comes(served_lite: Served) -> None:
    versions = [record(), record(created=1.72e9), record(name="other.py:Net")]
    for one in versions:
        put(served_lite, *named(one))
    found = items(look(served_lite, file="other.py"))
    assert found == dict(map(named, versions))


def test_an_answer_is_compressed_where_that_is_understood(served_lite: Served) -> None:
    put(served_lite, *named(record()))
    plain = look(served_lite, model=KEY.model)
    packed = look(served_lite, model=KEY.model, headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip" and len(packed.data) < len(plain.data)


def test_of_many_the_nearest_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_NEAREST", 3)
    others = [
        changed(KEY, "device.name", "NVIDIA B200"),
        changed(KEY, "mode", "infer"),
        changed(changed(KEY, "mode", "infer"), "dtype", "float64"),
        changed(KEY, "software.driver", "590.2"),
        KEY,
    ]
    written = [named(record(key=key, trials=0)) for key in others]
    for one in written:
        assert put(served, *one).status == 201
    query = Query(environment=ENVIRONMENT, model=KEY.model, given={"mode": "train"})
    found = look(served, model=KEY.model, wanted=json.dumps(to_plain(query.stated)))
    assert list(items(found)) == [written[4][0], written[3][0]]  # what fits, and nothing else
    monkeypatch.setattr(records, "MOST_RECORDS", 1)
    found = look(served, model=KEY.model, wanted=json.dumps(to_plain(query.stated)))
    assert list(items(found)) == [written[4][0]]
    wanted = to_plain(fields(KEY)) | {"optimizer": "adamw"}
    found = look(served, model=KEY.model, wanted=json.dumps(wanted))
    assert len(items(found)) == 3 and written[2][0] not in items(found)  # which differs the most


def test_many_of_one_name_cost_no_more(served: Served) -> None:
    """Neither in records that are compared nor in what is sent, whatever the order they came in."""
    for number in range(40):
        one = record(key=changed(KEY, "model", f"{number:064x}"), created=1.7e9 + number, trials=0)
        one = replace(one, target=replace(one.target, code=f"{number:02x}"))
        put(served, *named(one))
    wanted = json.dumps(to_plain(Query(environment=ENVIRONMENT).stated))
    asked = {"target": text_digest("model.py:Net"), "wanted": wanted}
    (mine,) = items(look(served, **asked, code="03"))
    assert f"/{3:064x}"[:13] in mine
    assert len(items(look(served, **asked, code="ff"))) == records.MOST_NEAREST  # none is it
    assert len(items(look(served, **asked))) == records.MOST_RECORDS
    seen: list[str] = []
    fields_of = records._fields
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(records, "_fields", lambda known: seen.append(known) or fields_of(known))
        other = json.dumps(to_plain(fields(KEY)) | {"mode": "infer"})
        assert len(items(look(served, **asked | {"wanted": other}))) == records.MOST_NEAREST
    assert len(seen) == 1


def test_records_from_before_a_field_was_added_are_found(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a client that knows the field, and by one that does not."""
    put(served, *named(record()))
    older = to_plain(fields(KEY))
    for module in (key_of, match):
        monkeypatch.setattr(module, "PLACE", (*PLACE, "flavour"))
    monkeypatch.setitem(key_of.ADDED, "flavour", "plain")
    records._fields.cache_clear()
    for wanted in (older, older | {"flavour": "plain"}):
        assert len(items(look(served, model=KEY.model, wanted=json.dumps(wanted)))) == 1
        assert len(items(look(served, family="", wanted=json.dumps(wanted)))) == 1
    records._fields.cache_clear()


def test_of_too_many_bytes_the_keys_are_told(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = dict(named(record(key=changed(KEY, "threads", n))) for n in range(5))
    for one in several.items():
        put(served, *one)
    size = max(map(len, several.values()))
    monkeypatch.setattr(records, "MOST_BYTES", 2 * size)
    monkeypatch.setattr(records, "MOST_FETCHED", 3 * size)
    found = items(look(served, model=KEY.model))
    assert found.keys() == several.keys()
    assert [data is not None for data in found.values()] == [True] * 2 + [False] * 3
    fetched = items(served.ask("POST", "/api/records", "read", {"keys": list(several)}))
    assert len(fetched) == 3


def test_keys_have_pages(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    written = sorted(named(record(key=changed(KEY, "threads", n), trials=0))[0] for n in range(7))
    for n in range(7):
        put(served, *named(record(key=changed(KEY, "threads", n), trials=0)))
    with served.database.reading() as session:
        page, more = records.listed(session, "", 4)
        rest, end = records.listed(session, page[-1], 4)
    assert (page + rest, more, end) == (written, True, False)


def test_bodies_are_bounded(served_lite: Served) -> None:
    key, _data = named(record())
    assert put(served_lite, key, b"x" * (2**20 + 1)).status == 413
    assert served_lite.ask("POST", "/api/records", "read", {"keys": [key] * 65}).status == 422
    assert served_lite.ask("POST", "/api/records", "read", b"[" * 10_000).status == 422


HEAD = "PUT /api/records/record/0 HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [
        ("worker", "Content-Length: 1048577", 413),
        ("", "Content-Length: 1048577", 413),
        ("", "Content-Length: 1048576", 401),
        ("", "Transfer-Encoding: chunked", 401),
        ("adv_guessed", "Transfer-Encoding: chunked", 401),
        ("worker", "Transfer-Encoding: chunked", 413),
    ],
)
def test_a_large_body_is_refused_before_it_comes(
    served_lite: Served, token: str, body: str, status: int
) -> None:
    """Without a valid token: many of them filled the server's memory."""
    known = served_lite.tokens.get(token, token)
    with socket.create_connection(("127.0.0.1", served_lite.port), timeout=60) as client:
        client.sendall(f"{HEAD}{body}\r\nAuthorization: Bearer {known}\r\n\r\n".encode())
        if token == "worker" and "chunked" in body:
            client.sendall(b"100001\r\n" + b"x" * 0x100001 + b"\r\n0\r\n\r\n")
        assert client.recv(2**12).startswith(f"HTTP/1.1 {status}".encode())


def test_many_at_once_put_the_same(served: Served) -> None:
    key, data = named(record())
    with ThreadPoolExecutor(12) as several:
        said = list(several.map(lambda _: put(served, key, data).status, range(12)))
    assert sorted(said) == [200] * 11 + [201]
    events = served.ask("GET", "/api/audit", "admin").json["events"]
    assert [one["action"] for one in events].count("put") == 1


def test_a_database_that_is_away_is_said_and_not_shown(lite: str) -> None:
    with serving(lite) as served:
        with served.database.writing() as session:
            session.execute(text("ALTER TABLE items RENAME TO elsewhere"))
        answer = served.ask("GET", "/api/self", "read")
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    assert answer.json == {"detail": "the server's database does not answer"}


def test_metrics(lite: str) -> None:
    with serving(lite) as served:
        put(served, *named(record()))
        served.ask("GET", "/nowhere/at/all")
        said = served.ask("GET", "/metrics", "read").data.decode()
    assert "advisor_records 1.0" in said
    assert 'route="/api/records/{key:path}",status="201"} 1.0' in said
    assert "nowhere" not in said
    assert 'advisor_jobs{state="queued"} 0.0' in said


def test_headers(served_lite: Served) -> None:
    for path in ("/healthz", "/nowhere", "/api/self"):
        said = served_lite.ask("GET", path).headers
        assert said["content-security-policy"].startswith("default-src 'none'")
        assert said["x-content-type-options"] == "nosniff" and said["cache-control"] == "no-store"
        assert "server" not in said or said["server"] == "uvicorn"
