"""What a Redis store promises beyond the contract: logins, TLS, records that expire."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
import uuid
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


def test_what_a_server_says_steers_no_terminal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _address = server.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    while connection.recv(2**16):
                        connection.sendall(b"-ERR \x1b[2Jgone\r\n" * 8)

        threading.Thread(target=answer, daemon=True).start()
        store = open_store(f"redis://127.0.0.1:{server.getsockname()[1]}?timeout=20s")
        with pytest.raises(StoreError, match=r"\?\[2Jgone") as caught:
            store.keys()
        assert str(caught.value).isprintable()


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


def test_a_project_s_server_is_not_sent_the_user_s_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ADVISOR_CACHE")
    monkeypatch.setenv("ADVISOR_REDIS_PASSWORD", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"redis://127.0.0.1:{server.getsockname()[1]}?timeout=20s"
        (tmp_path / "pyproject.toml").write_text(f'[tool.advisor]\ncache = "{url}"\n')
        seen: list[bytes] = []

        def answer() -> None:
            for _ in range(2):
                connection, _address = server.accept()
                with connection:
                    seen.append(connection.recv(2**16))
                    connection.sendall(b"-ERR no\r\n" * 8)

        threading.Thread(target=answer, daemon=True).start()
        for stores in (open_stores(), open_stores(url)):
            with pytest.raises(StoreError):
                stores[0].keys()
    assert [b"s3cret" in one for one in seen] == [False, True]


def test_tls(tmp_path: Path) -> None:
    binary, openssl = shutil.which("redis-server"), shutil.which("openssl")
    if binary is None or openssl is None:
        pytest.skip("redis-server and openssl are needed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made, *names, *files], check=True, capture_output=True)
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
