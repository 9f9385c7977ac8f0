"""The contract of all stores, and further guarantees of the disk and Redis stores."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from advisor.cache.codec import encode
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter
from advisor.cache.records import Records
from advisor.cache.stores import ByteStore, open_store, open_stores
from advisor.cache.stores.disk import DiskStore
from advisor.errors import RecordDamaged, StoreDamaged, StoreError, UsageError
from tests.cache import servers
from tests.cache.examples import KEY, changed, record

BLOB = f"artifacts/{'ab' * 6}-{'cd' * 6}-64-{'ef' * 6}.{'09' * 6}"
ROOT = Path(__file__).resolve().parents[2]
S3 = pytest.param("s3", marks=pytest.mark.long)  # its server takes seconds to start


def item(threads: int) -> tuple[str, bytes]:
    """Key and bytes of a record; each number gives another record."""
    one = record(key=changed(KEY, "threads", threads), trials=0)
    data = encode(one)
    return Name.of(one, data).text, data


class TestContract:
    """To test a new store, add it to `params`."""

    @pytest.fixture(params=["disk", "dir", "redis", S3, "file"])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        if request.param == "redis":
            port = request.getfixturevalue("redis_port")
            return f"redis://127.0.0.1:{port}/0?prefix={uuid.uuid4().hex}&timeout=20s"
        if request.param == "s3":
            port = request.getfixturevalue("s3_port")
            place = f"s3://{servers.BUCKET}/{uuid.uuid4().hex}"
            return f"{place}?endpoint=http://127.0.0.1:{port}&timeout=20s"
        if request.param == "file":  # fsspec: its writes are not atomic
            return f"local://{tmp_path / 'store'}?timeout=20s"
        return f"{request.param}:{tmp_path / 'store'}"

    @pytest.fixture
    def store(self, url: str) -> ByteStore:
        return open_store(url)

    def test_reading_creates_nothing(self, store: ByteStore, tmp_path: Path) -> None:
        store.check_writable()
        assert (store.keys(), store.sizes(), store.get_many([item(1)[0], BLOB])) == ([], {}, {})
        assert store.get("a") is None and not store.delete("a") and not store.delete(BLOB)
        assert store.health() == "empty" and list(tmp_path.iterdir()) == []

    def test_put_get_and_delete(self, store: ByteStore, url: str) -> None:
        (one, first), (two, second) = sorted([item(1), item(2)])
        store.put(two, second)
        store.put(one, first)
        store.put(two, second)
        store.check_writable()
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(store.get, [one] * 8)) == [first] * 8
        for each in (store, open_store(url), open_store(store.url)):
            assert each.keys() == [one, two]
            assert (each.get(one), each.get(two), each.get(item(3)[0])) == (first, second, None)
            assert each.get_many([]) == {} and each.get_many([two, "a"]) == {two: second}
        assert store.delete(two) and not store.delete(two)
        assert store.keys() == [one] and store.get(two) is None
        assert store.health() == "ok"

    def test_blobs_are_not_records(self, store: ByteStore, url: str, tmp_path: Path) -> None:
        assert list(tmp_path.iterdir()) == []
        store.put(BLOB, b"before")
        store.put(BLOB, b"\0" * 2**21)
        again = open_store(url)
        assert again.sizes() == {BLOB: 2**21} and again.keys() == []
        assert again.sizes(BLOB[:-12]) == {BLOB: 2**21}
        assert again.sizes(f"artifacts/0{BLOB[10:-12]}") == {}
        assert again.get_many([BLOB, "a"], 2**21) == {BLOB: b"\0" * 2**21}
        with pytest.raises(StoreError, match="larger than"):
            again.get(BLOB, 2**21 - 1)
        for act in (store.get, store.delete, lambda key: store.put(key, b"")):
            with pytest.raises(StoreError, match="not a blob's key"):
                act("artifacts/../elsewhere")
        assert again.delete(BLOB) and not again.delete(BLOB) and again.sizes() == {}

    def test_record_queries(self, store: ByteStore) -> None:
        records = Records(store)
        one, two = record(), record(key=changed(KEY, "software.driver", "590.2"))
        named = record(name="other.py:Net", created=1.72e9)
        for each in (one, two, named):
            records.put(each)
        assert len(records.all()) == 2
        assert [h.record for h in records.held(RecordFilter(target="other.py:Net"))] == [named]
        assert len(records.held(RecordFilter(model=KEY.model))) == 3  # one record has two names
        assert records.held(RecordFilter(model="cd" * 32)) == []
        assert records.one(two.id[:6]).record == two
        assert records.one(one.id).record == named  # same key: the newest
        assert [held.record for held in records.newest(1)] == [named] and records.left == 1
        assert len(records.newest(2)) == 2 and records.left == 0
        assert len(records.remove(records.versions(two.key.id, two.batch))) == 1
        assert records.versions(two.key.id, two.batch) == [] and len(records.all()) == 1

    def test_a_damaged_record_is_skipped_and_named(self, store: ByteStore) -> None:
        records = Records(store)
        good, bad = record(), record(key=changed(KEY, "mode", "infer"))
        records.put(good)
        store.put(Name.of(bad, b"rubbish").text, b"rubbish")
        assert records.all() == [good]
        (line,) = records.damaged
        assert line.startswith(f"{bad.id}: record: not msgpack")
        with pytest.raises(RecordDamaged, match=bad.id):
            records.one(bad.id)
        assert len(records.remove(records.named(bad.id))) == 1
        assert records.all() == [good] and records.damaged == []


def test_the_file_layout_is_stable_and_shared_by_schemes(tmp_path: Path) -> None:
    """Existing stores stay readable, also through another scheme."""
    (tmp_path / "artifacts").mkdir()
    (tmp_path / BLOB).write_bytes(b"blob")
    (tmp_path / "artifacts" / ".writing-1-a").write_bytes(b"cut")
    (tmp_path / "artifacts" / "other").write_bytes(b"no blob")
    (tmp_path / "record-ab-1.msgpack").write_bytes(b"record")
    for scheme, keys in (("dir:", ["record/ab/1"]), ("local://", ["record/ab/1"]), ("disk:", [])):
        store = open_store(f"{scheme}{tmp_path}")
        assert (store.get(BLOB), store.sizes(), store.keys()) == (b"blob", {BLOB: 4}, keys)
        assert store.get_many(keys) == dict.fromkeys(keys, b"record")


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "store")


def database_file(store: DiskStore) -> Path:
    return store.path / "records" / "cache.db"


@pytest.mark.parametrize("how", ["rubbish", "header", "middle", "cut", "text", "foreign"])
def test_a_corrupt_database_is_reported_and_quarantined(disk: DiskStore, how: str) -> None:
    for n in range(5):
        disk.put(f"record/{n}", b"x" * 12_000)
    data = database_file(disk).read_bytes()
    broken = {
        "rubbish": b"This is no database. " * 1000,
        "header": b"\0" * 100 + data[100:],
        "middle": data[:4096] + b"\xff" * (len(data) - 4096),
        "text": data.replace(b"CREATE TABLE Cache", b"CREATE TABLE C\xffche"),
        "cut": data[: len(data) // 2],
        "foreign": data.replace(b"Cache", b"Other"),
    }[how]
    database_file(disk).write_bytes(broken)
    store = DiskStore(disk.path)
    with pytest.raises(StoreDamaged) as caught:
        store.keys()
        store.check_writable()
    assert str(store.path / "records") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.health().startswith("damaged: ")
    aside = store.quarantine()
    assert (aside / "cache.db").read_bytes() == broken
    store.check_writable()
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_a_half_created_database_is_completed(disk: DiskStore) -> None:
    for left in ("DROP INDEX Cache_key_raw", "DROP TABLE Cache", ""):
        disk.put("a", b"1")
        with contextlib.closing(sqlite3.connect(database_file(disk))) as connection:
            connection.execute(left)
        if not left:
            database_file(disk).write_bytes(b"")
        assert disk.get_many(["b"]) == {}
        disk.check_writable()
        disk.put("b", b"2")
        assert disk.get("b") == b"2" and disk.delete("b")


def test_a_locked_store_is_not_damaged(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put("a", b"1")
    monkeypatch.setattr("advisor.cache.stores.disk._WRITE_TIMEOUT_S", 0.05)
    with contextlib.closing(sqlite3.connect(database_file(disk), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert disk.get("a") == b"1"  # readers do not wait for writers
        with pytest.raises(StoreError, match="locked by another process") as caught:
            disk.put("b", b"2")
    assert not isinstance(caught.value, StoreDamaged)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder tree read-only; for root, who ignores modes, with a bind mount."""
    if os.geteuid() != 0:
        inside = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in inside:
            path.chmod(0o500)
        try:
            yield
        finally:
            for path in inside:
                path.chmod(0o700)
        return
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
        pytest.skip("root, and no bind mount is allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_read_only_store_can_be_read(disk: DiskStore, tmp_path: Path) -> None:
    disk.put("a", b"1")
    copy = DiskStore(tmp_path / "copy")
    database_file(copy).parent.mkdir(parents=True)
    with read_only(disk.path):
        assert (disk.keys(), disk.get("a"), disk.health()) == (["a"], b"1", "ok, read-only")
        for act in (lambda: disk.put("b", b"2"), disk.check_writable, disk.quarantine):
            with pytest.raises(StoreError, match="ADVISOR_CACHE") as caught:
                act()
            assert not isinstance(caught.value, StoreDamaged)
    with contextlib.closing(sqlite3.connect(database_file(disk))) as writer:
        writer.execute("INSERT INTO Cache (key, raw, mode, value) VALUES ('b', 1, 1, x'32')")
        writer.commit()  # in the write-ahead log only
        with read_only(disk.path):
            assert DiskStore(disk.path).keys() == ["a", "b"]
        for name in ("cache.db", "cache.db-wal"):  # as after a killed writer
            shutil.copy(disk.path / "records" / name, copy.path / "records")
    with read_only(copy.path), pytest.raises(StoreError, match="advisor show") as caught:
        copy.keys()
    assert not isinstance(caught.value, StoreDamaged)
    assert copy.keys() == ["a", "b"]


def start_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE)


def test_concurrent_processes_read_and_write_whole_values(disk: DiskStore) -> None:
    code = """
import sys
from advisor.cache.stores.disk import DiskStore
path, me = sys.argv[1:]
store = DiskStore(path)
for turn in range(3):
    store.put(f"record/{me}", bytes([turn]) * 20_000)
    store.put("record/shared", me.encode() * 5_000)
    for key in store.keys():
        data = store.get(key)
        assert data is not None and len(set(data[i:i+2] for i in range(0, len(data), 2))) == 1, key
"""
    running = [start_process(code, str(disk.path), f"{n:02}") for n in range(3)]
    assert [(process.communicate(), process.returncode)[1] for process in running] == [0] * 3
    assert disk.keys() == sorted([*(f"record/{n:02}" for n in range(3)), "record/shared"])
    assert disk.health() == "ok"


def test_a_killed_writer_leaves_only_whole_values(disk: DiskStore) -> None:
    code = """
import sys
from advisor.cache.stores.disk import DiskStore
store = DiskStore(sys.argv[1])
for n in range(10_000):
    store.put(f"record/{n % 50}", bytes([n % 256]) * 100_000)
    print(n, flush=True)
"""
    for written in (1, 7, 13):
        process = start_process(code, str(disk.path))
        assert process.stdout is not None
        for _ in range(written):  # by now it is writing the next one
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = disk.get_many(disk.keys())
        assert len(found) >= written and disk.health() == "ok"
        for data in found.values():
            assert isinstance(data, bytes) and len(data) == 100_000 and len(set(data)) == 1
    disk.put("record/after", b"1")
    assert disk.get("record/after") == b"1"


def test_records_expire(redis_port: int) -> None:
    url = f"redis://127.0.0.1:{redis_port}?prefix={uuid.uuid4().hex}&timeout=20s"
    short, lasting = open_store(f"{url}&ttl=100ms"), open_store(url)
    lasting.put("record/lasting", b"1")
    short.put("record/short", b"2")
    limit = time.monotonic() + 20
    # Expiry follows the server's clock, which may be set back during the test.
    while lasting.get("record/short") is not None or "record/short" in lasting.keys():
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert lasting.keys() == ["record/lasting"] and lasting.get("record/lasting") == b"1"


def test_where_keys_lie_in_redis(redis_port: int) -> None:
    """Existing stores stay readable; planted values are refused."""
    prefix, place = uuid.uuid4().hex, f"redis://127.0.0.1:{redis_port}"
    store, other = (
        open_store(f"{place}?prefix={name}&timeout=20s") for name in (prefix, f"{prefix}2")
    )
    Records(store).put(record())
    (key,) = store.keys()
    with redis.Redis(port=redis_port) as client:
        client.set(f"{{{prefix}}}:{BLOB}", "12345")
        client.zadd(f"{{{prefix}}}:artifacts", {BLOB: "+inf"})
        client.rename(f"{{{prefix}}}:{key}", f"{{{prefix}2}}:{key}")
        names = dict.fromkeys((key, "record/list", b"\xff\xfe"), "+inf")
        client.zadd(f"{{{prefix}2}}:names", names)
        client.rpush(f"{{{prefix}2}}:record/list", "not a string")
    assert (store.sizes(), store.get(BLOB), store.get(key)) == ({BLOB: 5}, b"12345", None)
    assert other.sizes() == {} and Records(other).all() == [record()]
    assert isinstance(other.get_many(["record/list"])["record/list"], RecordDamaged)


@contextlib.contextmanager
def refusing_server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers everything with an error; yields its URL and what it received."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the server socket is closed
                while True:
                    connection, _address = server.accept()
                    with connection:
                        while data := connection.recv(2**16):
                            sent.append(data)
                            connection.sendall(b"-ERR \x1b[2Jgone\r\n" * 8)

        threading.Thread(target=answer, daemon=True).start()
        yield f"redis://127.0.0.1:{server.getsockname()[1]}?timeout=20s", sent


def test_no_password_for_a_project_s_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control characters in the server's answer are replaced in the error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ADVISOR_CACHE")
    monkeypatch.setenv("ADVISOR_REDIS_PASSWORD", "s3cret")
    with refusing_server() as (url, sent):
        (tmp_path / "pyproject.toml").write_text(f'[tool.advisor]\ncache = "{url}"\n')
        for stores, is_sent in ((open_stores(), False), (open_stores(url), True)):
            with pytest.raises(StoreError, match=r"\?\[2Jgone") as caught:
                stores[0].keys()
            assert str(caught.value).isprintable()
            assert (b"s3cret" in b"".join(sent)) is is_sent


def test_a_user_with_a_password(redis_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis.Redis(port=redis_port) as client:
        client.acl_setuser(
            "tuner", enabled=True, passwords=["+s3cret/word"], keys=["*"], categories=["+@all"]
        )
    place = f"127.0.0.1:{redis_port}/0?timeout=20s"
    inside = open_store(f"redis://tuner:s3cret%2Fword@{place}")
    assert inside.health() in ("ok", "empty")
    wrong = open_store(f"redis://tuner:wr0ng@{place}")
    with pytest.raises(StoreError, match="invalid username-password") as caught:
        wrong.keys()
    assert "wr0ng" not in str(caught.value) and "ADVISOR_REDIS_PASSWORD" in str(caught.value)
    with pytest.raises(UsageError, match="unknown option 'bogus'"):
        open_store(f"redis://{place}&bogus=1").keys()
    monkeypatch.setenv("ADVISOR_REDIS_USERNAME", "tuner")
    monkeypatch.setenv("ADVISOR_REDIS_PASSWORD", "s3cret/word")
    assert open_store(f"redis://{place}").health() in ("ok", "empty")


def test_tls(tmp_path: Path) -> None:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is needed")
    key, certificate = servers.certificate(tmp_path)
    port = servers.free_port()
    command = [binary, "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    command += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with servers.running(servers.Server([*command, "--save", ""], port)):
        place = f"rediss://127.0.0.1:{port}?timeout=20s"
        trusted = open_store(f"{place}&ssl_ca_certs={certificate}")
        trusted.put("a", b"1")
        assert trusted.get("a") == b"1"
        with pytest.raises(StoreError, match="certificate"):
            open_store(place).keys()
