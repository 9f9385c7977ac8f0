"""`advisor serve` as a process: start, stop, kill, two servers, listening, TLS."""

from __future__ import annotations

import asyncio.constants
import contextlib
import ctypes
import http.client
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

from advisor.cache.codec import decode
from advisor.cache.name import Name
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cli import main
from advisor.errors import StoreError, UsageError
from advisor.service import blobs, records, tokens
from advisor.service.database import Database
from advisor.service.run import Where, new_token
from advisor.service.schema import Item
from tests.cache import servers
from tests.cache.examples import KEY, changed, record
from tests.face.commands import check_document
from tests.forks import until
from tests.service.serving import ask, serving
from tests.service.test_records import packed

ROOT = Path(__file__).parents[2]


class Process:
    """A running `advisor serve`; `program` replaces `-m advisor`."""

    def __init__(self, *words: str, program: Sequence[str] = ("-m", "advisor")) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *program, "serve", "--port", "0", *words],
            # The executor's files lie next to the test's other data.
            env={"XDG_CACHE_HOME": f"{os.environ['XDG_DATA_HOME']}-cache"}
            | os.environ
            | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.port = 0
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())
            if found := re.search(r"serving on https?://\S+:(\d+)$", line):
                self.port = int(found[1])
                return
        raise AssertionError(self.lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def token(self) -> str:
        return "".join(line.rpartition(" ")[2] for line in self.lines if "admin token" in line)

    def stop(self, how: signal.Signals) -> int:
        self._process.send_signal(how)
        rest, _ = self._process.communicate(timeout=60)
        self.lines += rest.splitlines()
        return self._process.returncode


@contextlib.contextmanager
def process(*words: str) -> Iterator[Process]:
    found = Process(*words)
    try:
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            found.stop(signal.SIGKILL)


def numbered_record(number: int) -> tuple[str, bytes]:
    return packed(record(key=changed(KEY, "threads", number), trials=0))


def test_acknowledged_records_survive_a_kill(sqlite_url: str) -> None:
    """Each has its line in the audit log, and no record is partial. The server never loads torch,
    which takes seconds."""
    acknowledged: list[str] = []

    def write(first: int, port: int, token: str) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server was killed
            for number in itertools.count(first, 4):
                key, data = numbered_record(number)
                if ask(port, "PUT", f"/api/records/{quote(key)}", token, data).status == 201:
                    acknowledged.append(key)

    words = ("--database", sqlite_url, "--executor", "none")
    with ThreadPoolExecutor(4) as pool, process(*words) as server:
        token = server.token
        assert re.fullmatch(r"adv_[\w-]{43}", token)
        for first in range(4):
            pool.submit(write, first, server.port, token)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        login = ask(server.port, "POST", "/login", "", f"token={token}".encode(), form)
        cookie = {"Cookie": login.headers["set-cookie"].partition(";")[0]}
        until(lambda: len(acknowledged) >= 20)
        name = Name.parse(acknowledged[0])
        assert name is not None
        for path in ("/", f"/records/{name.record_id}"):
            page = ask(server.port, "GET", path, headers=cookie)
            assert page.status == 200 and b"model.py:Net" in page.data
        if sys.platform == "linux":
            assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    with serving(sqlite_url, existing=True) as restarted, restarted.database.reading() as session:
        stored_keys = list(blobs.listed(session, Item, "")[0])
        stored = records.data_of(session, stored_keys)
        events = tokens.events(session, None, 10**6)
    assert set(acknowledged) <= set(stored_keys)
    assert all(Name.of(decode(data), data).text == key for key, data in stored.items())
    assert sorted(one["subject"] for one in events if one["action"] == "put") == stored_keys


def test_two_servers_share_one_database(postgresql_url: str) -> None:
    with serving(postgresql_url) as one, serving(postgresql_url) as other:
        one.tokens = other.tokens  # the second start replaced the tokens
        key, data = numbered_record(1)
        sent = ("PUT", f"/api/records/{quote(key)}", "worker", data)
        assert [each.ask(*sent).status for each in (one, other)] == [201, 200]
        known = one.ask("GET", "/api/tokens", "admin").json["tokens"]
        (number,) = [token["id"] for token in known if token["role"] == "read"]
        assert other.ask("GET", "/api/records", "read").json["keys"] == [key]
        one.ask("DELETE", f"/api/tokens/{number}", "admin")
        assert other.ask("GET", "/api/self", "read").status == 401  # revoked on both at once


def test_concurrent_starts_make_one_admin_token(database_url: str) -> None:
    made: list[int] = []

    def start(_number: int) -> None:
        database = Database(database_url)
        database.start(lambda _session: made.append(1))
        database.close()

    with ThreadPoolExecutor(6) as several:
        list(several.map(start, range(6)))
    assert made == [1]


def test_a_request_in_progress_is_answered_before_shutdown(sqlite_url: str) -> None:
    key, data = numbered_record(1)
    with (
        serving(sqlite_url) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as client,
    ):
        head = f"PUT /api/records/{quote(key)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        head += f"{server.tokens['worker']}\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data[:100])
        until(lambda: bool(server.server.server_state.tasks))
        server.server.should_exit = True
        until(server.stopping.is_set)
        client.sendall(data[100:])
        assert client.recv(2**12).startswith(b"HTTP/1.1 201")
    with serving(sqlite_url, existing=True) as again:
        assert list(again.database.read(blobs.listed, Item, "")[0]) == [key]


def test_the_server_recovers_after_a_postgresql_restart() -> None:
    with servers.postgresql() as postgresql:
        url = f"postgresql+psycopg://advisor@127.0.0.1:{postgresql.port}/postgres"
        with serving(url) as server:
            key, data = numbered_record(1)
            server.ask("PUT", f"/api/records/{quote(key)}", "worker", data)
            postgresql.kill()
            assert server.ask("GET", "/readyz").status == 503
            assert server.ask("GET", "/healthz").status == 200
            postgresql.start()
            until(lambda: server.ask("GET", "/readyz").status == 200)
            assert server.ask("GET", "/api/records", "read").json["keys"] == [key]


def test_bad_databases_are_refused_and_sqlite_is_private(tmp_path: Path, sqlite_url: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "rubbish.db").write_bytes(b"no database" * 1000)
    for url, says in (
        ("mysql://me:s3cret@host/db", "expected sqlite"),
        ("no url with s3cret", "no URL of a database"),
        ("sqlite://", "names no file"),
        ("sqlite:////x/y.db?s3cret=1", "takes no options"),
        ("postgresql+psycopg://me:s3cret@127.0.0.1:1/x", "refused"),
        (f"sqlite:///{tmp_path}/file/x.db", "file"),
        (f"sqlite:///{tmp_path}/rubbish.db", "not a database"),
    ):
        with pytest.raises((StoreError, UsageError), match=says) as caught:
            Database(url).start(lambda _session: None)
        assert "s3cret" not in str(caught.value)
    database = Database(sqlite_url)
    database.start(lambda _session: None)
    file = sqlite_url.removeprefix("sqlite:///")
    with database.writing():
        modes = {end: Path(file + end).stat().st_mode & 0o777 for end in ("", "-wal", "-shm")}
    assert set(modes.values()) == {0o600}, modes
    database.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_listening_options_are_checked(sqlite_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Even a failed start makes its environment unreadable to the user's other processes."""
    with pytest.raises(UsageError, match="sent unencrypted"):
        Where(host="0.0.0.0")
    for url in ("foo", "ftp://x", "http://", "http://x:99999"):
        with pytest.raises(UsageError, match=r"--url .*: expected http\[s\]://"):
            Where(url=url)
    assert Where(url="https://advisor.example/a").url
    # By default submitted code runs here only if the server is local and behind no proxy.
    assert Where().executors == Where(host="::1").executors == ("local",)
    for host in ("0.0.0.0", "127.0.0.1"):
        assert Where(host=host, behind_proxy=True).executors == ("none",)
    getting, setting = 3, 4  # PR_GET_DUMPABLE, PR_SET_DUMPABLE
    control = ctypes.CDLL(None).prctl
    try:
        assert control(setting, 1, 0, 0, 0) == 0
        with servers.socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            assert main(["serve", "--port", port, "--database", sqlite_url]) == 2
        assert control(getting, 0, 0, 0, 0) == 0
    finally:
        control(setting, 1, 0, 0, 0)
    assert main(["serve", "--database", sqlite_url, "--executor", "slurm"]) == 2
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()  # so no unseen admin token
    address, executor = capsys.readouterr().err.splitlines()
    assert "--executor 'slurm': expected one of local" in executor
    assert re.search(rf"--port {port}: Address already in use", address)
    for port in ("-1", "65536", "x", "", "1.5", "1_0", "８０", "9" * 5000):
        assert main(["serve", "--port", port]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"--port {port[:40]!r}: expected 0 to 65535; 0 takes any free port")


def test_the_token_command_needs_an_initialised_database(
    sqlite_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ["token", "gpu-01", "--role", "worker", "--database", sqlite_url, "--json"]
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    assert main(make) == 2 and not file.exists()
    file.touch()
    assert main(make) == 2  # no server has made the first token
    assert capsys.readouterr().err.count("no server has used it; run advisor serve first\n") == 2
    with serving(sqlite_url) as server:
        assert main(make) == 0
        made = check_document("token", capsys.readouterr().out.splitlines()[-1])
        made["token"] = new_token(Database(sqlite_url), "gpu-01", "worker", 30)
        monkeypatch.setenv("ADVISOR_TOKEN", made["token"])
        open_store(server.url).check_writable()
        (last, *_) = server.ask("GET", "/api/audit", "admin").json["events"]
        assert (last["action"], last["by"]) == ("token made", None)
        assert "gpu-01 (worker)" in last["subject"]
    monkeypatch.setenv("ADVISOR_DATABASE", "mysql://x")
    assert main(["token", "x"]) == 2
    assert "expected sqlite" in capsys.readouterr().err


def test_tls_is_verified(tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = servers.certificate(tmp_path)
    # Otherwise it waits seconds for clients to shut down TLS.
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 0.1)
    with serving(sqlite_url, ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        monkeypatch.setenv("ADVISOR_TOKEN", server.tokens["worker"])
        url = f"https://127.0.0.1:{server.port}?timeout=3s"
        with pytest.raises(StoreError, match="certificate"):
            open_store(url).keys()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        store = open_store(url)
        Records(store).put(record())
        assert Records(store).all() == [record()]


def test_without_the_serve_extra_one_line_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "advisor.service.run", None)
    monkeypatch.delattr("advisor.service.run")
    assert main(["serve"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.endswith("run: pip install 'torch-advisor[serve]'\n")
    assert len(output.err.splitlines()) == 1
