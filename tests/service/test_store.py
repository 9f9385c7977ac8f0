"""A server as a store: the store contract, the number of requests, outages, tokens, sync."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from advisor.cache.artifacts import Purpose, Tools
from advisor.cache.exchange import contents, copy_artifacts, copy_records
from advisor.cache.match import Query, best
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record, Target
from advisor.cache.records import Records
from advisor.cache.settings import cache_urls, server_url
from advisor.cache.signing import KeyRing
from advisor.cache.stores import ByteStore, open_store
from advisor.cache.stores import http as http_module
from advisor.cache.stores.http import HttpStore
from advisor.cache.stores.http_client import MAX_ANSWER
from advisor.cache.task import PERMITTED
from advisor.cli import main
from advisor.client import Client
from advisor.errors import RecordDamaged, StoreError, UsageError
from advisor.open_store import open_records
from advisor.service import blobs
from advisor.service import records as kept
from tests.cache import servers, test_store
from tests.cache.examples import ENVIRONMENT, KEY, changed, record
from tests.cache.test_store import item
from tests.face import test_why
from tests.face.commands import MODEL
from tests.service.serving import LiveServer, Respond, fake_server

OURS = KeyRing(own=b"k" * 32)


@pytest.fixture
def writable(sqlite_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """A server on SQLite; ADVISOR_TOKEN has the worker role."""
    monkeypatch.setenv("ADVISOR_TOKEN", sqlite_server.tokens["worker"])
    return sqlite_server


@pytest.fixture
def each_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """Like `writable`, on each database."""
    monkeypatch.setenv("ADVISOR_TOKEN", server.tokens["worker"])
    return server


class TestContract(test_store.TestContract):
    """The store contract for a store that accepts only valid records."""

    @pytest.fixture
    def url(self, each_server: LiveServer) -> str:  # type: ignore[override]
        return each_server.url

    def test_a_damaged_record_is_skipped_and_named(self, store: ByteStore) -> None:
        with pytest.raises(RecordDamaged, match="not msgpack"):
            store.put(item(1)[0], b"rubbish")
        with pytest.raises(RecordDamaged):
            store.put("a", b"1")
        assert store.keys() == [] and store.get("a") is None and not store.delete("a")


def test_a_lookup_is_one_request(each_server: LiveServer, requests: list[str]) -> None:
    store = open_store(each_server.url)
    assert store.searches
    records = Records(store, keyring=OURS)
    one = record()
    records.put(one)
    records.put(record(key=changed(KEY, "mode", "infer")))
    for filter_ in (
        RecordFilter(model=KEY.model, query=Query(environment=ENVIRONMENT, model=KEY.model)),
        RecordFilter(target="model.py:Net"),
        RecordFilter(file="model.py"),
        RecordFilter(id=one.key.id, batch=64),
    ):
        requests.clear()
        held = records.look_into(store, filter_).held
        assert one in [each.record for each in held] and all(each.trusted for each in held)
        assert requests == ["GET /api/lookup"], filter_
    local = open_store("dir:" + os.environ["ADVISOR_CACHE"])
    requests.clear()
    records.copy(held[0], local)
    assert requests == []  # the copy needs no further request
    assert records.look_into(store, RecordFilter(file="other.py")).held == []


def random_records(rng: random.Random) -> Iterator[Record]:
    """Records that differ in every field that lookups compare."""
    values: dict[str, tuple[object, ...]] = {
        "model": ("ab" * 32, "cd" * 32, "ef" * 32),
        "mode": ("train", "infer"),
        "shapes": ((3, 256, 256), (3, 8, 8)),
        "precisions": (PERMITTED, ("default",)),
        "max_memory": (0, 2**30),
        "software.driver": ("580.1", "590.2", "590.2"),
        "device.name": ("NVIDIA H200", "NVIDIA B200"),
        "device.capability": ("9.0", "9.0", "10.0"),
    }
    for number in range(40):
        key = KEY
        for name, choices in values.items():
            key = changed(key, name, rng.choice(choices))
        key = changed(key, "shapes", ((rng.choice((8, 64)), *key.task.sample),))
        one = record(key=key, created=1.7e9 + number, trials=0)
        origin, code = rng.choice(("0a", "0b")), rng.choice(("c0", "c1", "c2"))
        target = Target(name="model.py:Net", origin=origin, code=code)
        yield replace(one, target=target, family=rng.choice(("", "f0")))


def random_filters(rng: random.Random) -> Iterator[RecordFilter]:
    """Lookups by model, and by target name with known, moved or unknown code."""
    for _ in range(40):
        given: dict[str, Any] = {"mode": "train"}
        given |= rng.choice(({}, {"shapes": ((rng.choice((8, 64)), 3, 8, 8),)}))
        given |= rng.choice(({}, {"precisions": ("default",)}, {"max_memory": 2**29}))
        query = Query(environment=ENVIRONMENT, given=given)
        if rng.random() < 0.5:
            model = rng.choice(("ab", "cd", "ee")) * 32
            yield RecordFilter(model=model, query=replace(query, model=model))
        else:
            code, origin = rng.choice(("c0", "c9")), rng.choice(("0a", "0d"))
            now = Target(name="model.py:Net", code=code, origin=origin)
            yield RecordFilter(target="model.py:Net", query=query, now=now)


def best_match(records: Records, filter_: RecordFilter) -> tuple[str, Record | None]:
    """The best match among the store's records, chosen as `TargetResolver` does."""
    assert filter_.query is not None
    found = [one.record for one in records.held(filter_)]
    if now := filter_.now:
        of_code = [one for one in found if one.target.code == now.code]
        found = of_code or [one for one in found if one.target.origin == now.origin] or found
    match = best(filter_.query, found)
    return match.kind, match.record


def test_a_server_lookup_gives_the_same_match_as_a_folder(
    writable: LiveServer, requests: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    folder, server = Records(open_store(f"dir:{tmp_path}/s")), Records(open_store(writable.url))
    for one in random_records(rng):
        folder.put(one)
    list(copy_records(contents(folder.stores[0]), server, server.stores[0]))
    requests.clear()
    monkeypatch.setattr(kept, "MAX_RECORDS", 2)
    monkeypatch.setattr(kept, "MAX_NEAREST", 1)
    kinds = Counter()
    for filter_ in random_filters(rng):
        local, remote = best_match(folder, filter_), best_match(server, filter_)
        assert local == remote, filter_
        kinds[local[0]] += 1
    assert len(kinds) == 3 and set(requests) == {"GET /api/lookup"}
    monkeypatch.setattr(kept, "MAX_RECORDS", 12)
    for one in itertools.islice(random_records(rng), 6):
        for family in ("", "f0"):
            requests.clear()
            similar = folder.similar(one.key, family)[:12]
            assert server.similar(one.key, family)[:12] == similar and len(similar) > 4
            assert requests == ["GET /api/lookup"]


def holds_nine(store: ByteStore) -> bool:
    return len(Records(store).held(RecordFilter(model=KEY.model))) == 9


def test_large_listings_and_lookups_are_paged(
    each_server: LiveServer, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response over the size limit has only keys; too many keys come in pages."""
    store = open_store(each_server.url)
    stored = dict(item(n) for n in range(9))
    for key, data in stored.items():
        store.put(key, data)
    size, fetches = max(map(len, stored.values())), {"POST /api/records": 5}
    monkeypatch.setattr(blobs, "MAX_KEYS", 3)
    monkeypatch.setattr(http_module, "RECORDS_AT_ONCE", 4)
    monkeypatch.setattr(kept, "MAX_FETCHED", 2 * size)
    for bytes_, act, counts in (
        (size, lambda store: store.keys() == sorted(stored), {"GET /api/records": 3}),
        (size, lambda store: store.get_many([*stored, "record/none"]) == stored, fetches),
        (5 * size, holds_nine, {"GET /api/lookup": 1, "POST /api/records": 2}),
        (0, holds_nine, {"GET /api/lookup": 1, **fetches}),
    ):
        monkeypatch.setattr(kept, "MAX_ANSWER_BYTES", bytes_)
        requests.clear()
        assert act(open_store(each_server.url))
        assert Counter(requests) == counts


@pytest.mark.parametrize(
    ("role", "act", "says"),
    [
        ("read", lambda store: store.check_writable(), "may read, but not write"),
        ("read", lambda store: store.put(*item(1)), "this needs role 'worker'"),
        ("adv_" + "x" * 43, lambda store: store.keys(), "revoked; set ADVISOR_TOKEN"),
        ("with xxx", lambda store: store.keys(), "ADVISOR_TOKEN: malformed token.*advisor token"),
        ("", lambda store: store.keys(), "the request has no token"),
    ],
)
def test_insufficient_tokens_are_refused_and_never_shown(
    writable: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: str,
    act: Callable[[ByteStore], object],
    says: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    token = writable.tokens.get(role, role)
    monkeypatch.setenv("ADVISOR_TOKEN", token)
    store = open_store(writable.url)
    with pytest.raises((StoreError, UsageError), match=says) as caught:
        act(store)
    assert not token or token not in f"{caught.value} {caplog.text} {vars(store)}"
    assert role != "read" or store.health() == "empty"


def test_token_files(
    sqlite_server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, file = open_store(sqlite_server.url), tmp_path / "tokens"
    place = sqlite_server.url.partition("?")[0]
    token = sqlite_server.tokens["worker"]
    lines = ["# mine", f"https://elsewhere {'y' * 40}", f"{place}/ {token}"]
    file.write_text("\n".join(lines))
    monkeypatch.setenv("ADVISOR_TOKEN_FILE", str(file))
    with pytest.raises(UsageError, match="chmod 600"):
        store.keys()
    file.chmod(0o600)
    store.check_writable()
    with pytest.raises(StoreError, match="the request has no token"):  # not in the file
        open_store(f"http://localhost:{sqlite_server.port}").keys()
    monkeypatch.setenv("ADVISOR_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="No such file"):
        store.keys()
    monkeypatch.delenv("ADVISOR_TOKEN_FILE")
    _own_tokens().write_bytes(file.read_bytes())
    store.check_writable()


def _own_tokens() -> Path:
    """Create the user's default token file, empty."""
    own = Path(os.environ["XDG_DATA_HOME"]) / "advisor" / "tokens"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.touch(0o600)
    return own


def test_a_script_gets_its_record_in_one_request(
    writable: LiveServer, requests: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local store then has a copy, which serves later runs without the server."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    test_why.store_record(test_why.made(), writable.url)
    local, down = f"dir:{tmp_path}/local", f"http://127.0.0.1:{servers.free_port()}"
    for cache, status, says, expected in (
        (writable.url, "exact", "", ["GET /api/lookup"]),
        ([local, writable.url], "exact", "", ["GET /api/lookup"]),
        ([local, down], "exact", "", []),
        (down, "miss", "refused", ["GET /api/lookup"]),
    ):
        requests.clear()
        advice, output = test_why.look_up(cache=cache)
        assert advice.status == status and requests == expected
        assert says in output and bool(says) == bool(output)
        assert status == "miss" or advice.config["channels_last"] is True
    monkeypatch.delenv("ADVISOR_TOKEN")
    advice, output = test_why.look_up(cache=writable.url)
    assert advice.status == "miss" and "set ADVISOR_TOKEN to one of" in output


def test_store_sync(writable: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that the server refuses does not stop the sync."""
    local, back = open_store(f"dir:{tmp_path}/here"), open_store(f"dir:{tmp_path}/back")
    records = Records(local, keyring=OURS)
    Records(local, keyring=KeyRing(own=b"o" * 32)).put(record())
    records.put(record(created=1.72e9))
    records.put(record(key=changed(KEY, "threads", 1)))
    bad = record(key=changed(KEY, "mode", "infer"))
    local.put(Name.of(bad, b"rubbish").text, b"rubbish")
    monkeypatch.setattr(
        writable.service.reader, "_check", lambda one: "of tomorrow" if one.key.threads == 1 else ""
    )
    remote = open_store(writable.url)
    rows = list(copy_records(contents(local), records, remote))
    assert sorted(row.outcome for row in rows) == ["added", "added", "refused", "refused"]
    assert any(row.reason.endswith("record: of tomorrow; refused") for row in rows)
    assert [row.outcome for row in copy_records(contents(local), records, remote)].count(
        "known"
    ) == 2
    list(copy_records(contents(remote), records, back))
    assert back.keys() == remote.keys() and len(back.keys()) == 2


def test_only_the_owner_repairs_artifacts(writable: LiveServer, tmp_path: Path) -> None:
    local, remote = open_store(f"dir:{tmp_path}/here"), open_store(writable.url)
    records = Records([local, remote], keyring=OURS)
    tools = Tools(torch="2.11.0", triton="3.6.0", python="3.11.7")
    purpose = Purpose.of(record(), record().winner("loop").config, ENVIRONMENT, tools)
    size = records.artifacts.keep(random.Random(0).randbytes(2**21), purpose, local)
    (key,) = local.sizes()
    name = key.removeprefix("artifacts/")

    def copy() -> tuple[str, str]:
        (one,) = copy_artifacts(records, local, remote, {purpose.record})
        return one.outcome, one.reason

    remote.put(key, b"\0" * size)
    assert copy() == ("added", "") and copy() == ("known", "")
    assert remote.get(key, size) == local.get(key, size)
    writable.ask("DELETE", f"/api/artifacts/{name}", "admin")
    writable.ask("PUT", f"/api/artifacts/{name}", "admin", b"\0" * size)
    outcome, reason = copy()
    assert outcome == "refused" and "another token stored it" in reason


@contextlib.contextmanager
def fake_store(answer: Respond) -> Iterator[HttpStore]:
    with fake_server(answer) as url:
        yield HttpStore(f"{url}?timeout=5s")


BOMB = __import__("gzip").compress(b"\0" * (MAX_ANSWER + 2**20))


@pytest.mark.parametrize(
    ("status", "headers", "data"),
    [
        *((200, {}, data) for data in (b"<html>a page</html>", b"\xff" * 100, b"[" * 100_000)),
        *((200, {}, msgpack.packb({"items": items})) for items in (5, [5])),
        (200, {}, msgpack.packb({"items": [["../../etc/passwd", b"x"]]})),
        (200, {}, msgpack.packb({"items": [["record/\x1b[2J", b"x"]]})),
        (200, {}, b"\xdd\xff\xff\xff\xff"),
        (200, {}, b'{"keys": 5}'),
        (200, {}, b'{"keys": ["record/ab"], "more": true}'),
        *((200, {"Content-Encoding": "gzip"}, data) for data in (b"no gzip", BOMB)),
        (200, {"Content-Length": "100000000"}, b""),
        (302, {"Location": "https://elsewhere/?token=s3cret"}, b""),
        (500, {}, b'{"detail": "\x1b[2J"}'),
        (404, {}, b""),
    ],
)
def test_malformed_answers_raise_errors(status: int, headers: dict[str, str], data: bytes) -> None:
    with fake_store(lambda _path: (status, headers, data)) as store:
        if "Content-Length" in headers:
            store.timeout_s = 0.1
        get = (lambda: store.search({"model": "ab"}), lambda: store.get("record/ab"))
        for act in (*get, store.keys, store.check_writable):
            with pytest.raises(StoreError) as caught:
                act()
            assert str(caught.value).isprintable() and "s3cret" not in str(caught.value)
        assert store.health().startswith("unusable: ")


def test_a_busy_server_is_retried_after_a_short_wait_only(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr("advisor.cache.stores.http_client.time.sleep", paused.append)
    responses = [(429, {"Retry-After": "1"}, b"{}"), (200, {}, b'{"keys": [], "more": false}')]
    with fake_store(lambda _path: responses.pop(0)) as store:
        assert store.keys() == []
    busy = 429, {"Retry-After": "60"}, b'{"detail": "busy"}'
    with fake_store(lambda _path: busy) as store, pytest.raises(StoreError, match="busy"):
        store.keys()
    assert paused == [1.0]


def test_connections_are_reused_and_reopened_after_a_close() -> None:
    seen: list[int] = []
    body = b'{"keys": [], "more": false}'
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for number in range(2):
                connection, _address = server.accept()
                with connection:
                    for _ in range(2):
                        connection.recv(2**16)
                        seen.append(number)
                        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                        connection.sendall(head.encode() + body)

        threading.Thread(target=answer, daemon=True).start()
        store = HttpStore(f"http://127.0.0.1:{server.getsockname()[1]}?timeout=20s")
        for _ in range(4):
            assert store.keys() == []
    assert seen == [0, 0, 1, 1]


def test_pyproject_servers_get_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bytes]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ADVISOR_CACHE")
    monkeypatch.setenv("ADVISOR_TOKEN", "adv_" + "x" * 43)
    with fake_server(lambda _path: (401, {}, b""), seen) as url:
        config = f'[tool.advisor]\ncache = "{url}?timeout=5s"\n'
        (tmp_path / "pyproject.toml").write_text(config)
        named = cache_urls()
        for act in (
            lambda: open_records(None).all(),
            lambda: open_records(named).all(),
            lambda: open_records(list(named), fallback=True).stores[0].keys(),
            lambda: open_store(named[0]).keys(),
            lambda: Client(server_url()).jobs(),
        ):
            with pytest.raises(StoreError, match=r"not sent to a server that only pyproject\.toml"):
                act()
        assert main(["show"]) == 1 and main(["jobs"]) == 1
        assert seen == [("none", b"")] * 7
        _own_tokens().write_text(f"{url} {'y' * 40}\n")  # the user has a token for this server
        with pytest.raises(StoreError, match="set ADVISOR_TOKEN to one of"):
            open_records(None).all()
        assert seen.pop()[0] == f"Bearer {'y' * 40}"
        monkeypatch.setenv("ADVISOR_CACHE", url)
        for cache in (url, None):
            with pytest.raises(StoreError):
                open_records(cache).all()
        assert seen[7:] == [(f"Bearer adv_{'x' * 43}", b"")] * 2


def test_pyproject_cannot_allow_plain_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://advisor.team?insecure=1"
    (tmp_path / "pyproject.toml").write_text(f'[tool.advisor]\ncache = "{url}"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ADVISOR_CACHE")
    for act in (lambda: open_records(None), lambda: Client(server_url())):
        with pytest.raises(UsageError, match=r"insecure=1 .*\(not in pyproject\.toml\)"):
            act()
    assert open_records(url).stores[0].url == url
    monkeypatch.setenv("ADVISOR_CACHE", url)
    assert open_records(None).stores[0].url == url
