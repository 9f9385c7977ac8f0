"""What a Redis store promises beyond the contract: logins, TLS, records that expire."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from advisor.cache.records import Records
from advisor.cache.stores import open_store, open_stores
from advisor.errors import RecordDamaged, StoreError, UsageError
from tests.cache import servers
from tests.cache.examples import record


@pytest.fixture
def url(redis_port: int) -> str:
    return f"redis://127.0.0.1:{redis_port}?prefix={uuid.uuid4().hex}&timeout=20s"


def test_records_expire(url: str) -> None:
    short, lasting = open_store(f"{url}&ttl=100ms"), open_store(url)
    lasting.put("record/lasting", b"1")
    short.put("record/short", b"2")
    limit = time.monotonic() + 20
    # By the server's clock, which may be put back meanwhile.
    while lasting.get("record/short") is not None or "record/short" in lasting.keys():
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert lasting.keys() == ["record/lasting"] and lasting.get("record/lasting") == b"1"


def test_where_keys_lie(redis_port: int) -> None:
    """Stores that people have stay readable, and what is planted there is refused."""
    prefix, blob = uuid.uuid4().hex, f"artifacts/{'ab' * 6}-{'cd' * 6}-64-{'ef' * 6}.{'09' * 6}"
    place = f"redis://127.0.0.1:{redis_port}"
    store, other = (
        open_store(f"{place}?prefix={name}&timeout=20s") for name in (prefix, f"{prefix}2")
    )
    Records(store).put(record())
    (key,) = store.keys()
    with redis.Redis(port=redis_port) as client:
        client.set(f"{{{prefix}}}:{blob}", "12345")
        client.zadd(f"{{{prefix}}}:artifacts", {blob: "+inf"})
        client.rename(f"{{{prefix}}}:{key}", f"{{{prefix}2}}:{key}")
        client.zadd(
            f"{{{prefix}2}}:names", {key: "+inf", "record/list": "+inf", b"\xff\xfe": "+inf"}
        )
        client.rpush(f"{{{prefix}2}}:record/list", "not a string")
    assert (store.sizes(), store.get(blob), store.get(key)) == ({blob: 5}, b"12345", None)
    assert other.sizes() == {} and Records(other).all() == [record()]
    assert isinstance(other.get_many(["record/list"])["record/list"], RecordDamaged)


@contextlib.contextmanager
def refusing() -> Iterator[tuple[str, list[bytes]]]:
    """A server that refuses everything, and what it was sent."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the test is over
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
    """And what a server says steers no terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ADVISOR_CACHE")
    monkeypatch.setenv("ADVISOR_REDIS_PASSWORD", "s3cret")
    with refusing() as (url, sent):
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
