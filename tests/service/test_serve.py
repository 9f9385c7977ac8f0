"""`advisor serve` as a process: started, stopped, killed, beside another."""

from __future__ import annotations

import asyncio.constants
import contextlib
import ctypes
import http.client
import itertools
import json
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
from tests.forks import until
from tests.service.serving import ask, serving
from tests.service.test_records import named

ROOT = Path(__file__).parents[2]


class Process:
    """`advisor serve`, as a shell starts it; `program`: what stands for `advisor`."""

    def __init__(self, *words: str, program: Sequence[str] = ("-m", "advisor")) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *program, "serve", "--port", "0", *words],
            # What its executor keeps lies beside the test's other data.
            env={"XDG_CACHE_HOME": f"{os.environ['XDG_DATA_HOME']}-cache"}
            | os.environ
            | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        self.port = 0
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.strip())
            if found := re.search(r"serving on https?://\S+:(\d+)$", line):
                self.port = int(found[1])
                return
        raise AssertionError(self.said)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def token(self) -> str:
        return "".join(line.rpartition(" ")[2] for line in self.said if "admin token" in line)

    def stop(self, how: signal.Signals) -> int:
        self._process.send_signal(how)
        rest, _ = self._process.communicate(timeout=60)
        self.said += rest.splitlines()
        return self._process.returncode


@contextlib.contextmanager
def process(*words: str) -> Iterator[Process]:
    found = Process(*words)
    try:
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            found.stop(signal.SIGKILL)


def written(number: int) -> tuple[str, bytes]:
    return named(record(key=changed(KEY, "threads", number), trials=0))


def test_killed_while_it_writes(lite: str) -> None:
    """Whatever was acknowledged is there, with its line in the log, and nothing in halves. Records
    are checked and shown without torch, which takes seconds to import."""
    acknowledged: list[str] = []

    def write(first: int, port: int, token: str) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # it was killed
            for number in itertools.count(first, 4):
                key, data = written(number)
                if ask(port, "PUT", f"/api/records/{quote(key)}", token, data).status == 201:
                    acknowledged.append(key)

    with ThreadPoolExecutor(4) as pool, process("--database", lite, "--executor", "none") as server:
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
    with serving(lite, as_it_is=True) as served, served.database.reading() as session:
        there = list(blobs.listed(session, Item, "")[0])
        stored = records.data_of(session, there)
        events = tokens.events(session, None, 10**6)
    assert set(acknowledged) <= set(there)
    assert all(Name.of(decode(data), data).text == key for key, data in stored.items())
    assert sorted(one["subject"] for one in events if one["action"] == "put") == there


def test_two_servers_on_one_database(new_postgresql: str) -> None:
    with serving(new_postgresql) as one, serving(new_postgresql) as other:
        one.tokens = other.tokens  # what the second made fresh is the first's too
        key, data = written(1)
        sent = ("PUT", f"/api/records/{quote(key)}", "worker", data)
        assert [each.ask(*sent).status for each in (one, other)] == [201, 200]
        known = one.ask("GET", "/api/tokens", "admin").json["tokens"]
        (number,) = [token["id"] for token in known if token["role"] == "read"]
        assert other.ask("GET", "/api/records", "read").json["keys"] == [key]
        one.ask("DELETE", f"/api/tokens/{number}", "admin")
        assert other.ask("GET", "/api/self", "read").status == 401  # at once, everywhere


def test_servers_that_start_together_make_one_admin(database_url: str) -> None:
    made: list[int] = []

    def start(_number: int) -> None:
        database = Database(database_url)
        database.start(lambda _session: made.append(1))
        database.close()

    with ThreadPoolExecutor(6) as several:
        list(several.map(start, range(6)))
    assert made == [1]


def test_what_is_being_answered_is_answered_before_it_stops(lite: str) -> None:
    key, data = written(1)
    with (
        serving(lite) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=60) as client,
    ):
        head = f"PUT /api/records/{quote(key)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        head += f"{served.tokens['worker']}\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data[:100])
        until(lambda: bool(served.server.server_state.tasks))
        served.server.should_exit = True
        until(served.stopping.is_set)
        client.sendall(data[100:])
        assert client.recv(2**12).startswith(b"HTTP/1.1 201")
    with serving(lite, as_it_is=True) as again:
        assert list(again.database.read(blobs.listed, Item, "")[0]) == [key]


def test_postgresql_comes_back() -> None:
    with servers.postgresql() as server:
        url = f"postgresql+psycopg://advisor@127.0.0.1:{server.port}/postgres"
        with serving(url) as served:
            key, data = written(1)
            served.ask("PUT", f"/api/records/{quote(key)}", "worker", data)
            server.kill()
            assert served.ask("GET", "/readyz").status == 503
            assert served.ask("GET", "/healthz").status == 200
            server.start()
            until(lambda: served.ask("GET", "/readyz").status == 200)
            assert served.ask("GET", "/api/records", "read").json["keys"] == [key]


def test_what_a_database_may_be(tmp_path: Path, lite: str) -> None:
    """A file that only its owner reads."""
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
    database = Database(lite)
    database.start(lambda _session: None)
    file = lite.removeprefix("sqlite:///")
    with database.writing():
        modes = {end: Path(file + end).stat().st_mode & 0o777 for end in ("", "-wal", "-shm")}
    assert set(modes.values()) == {0o600}, modes
    database.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_where_it_may_listen(lite: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it ends with, no job of the same user reads its environment."""
    with pytest.raises(UsageError, match="sent unencrypted"):
        Where(host="0.0.0.0")
    for url in ("foo", "ftp://x", "http://", "http://x:99999"):
        with pytest.raises(UsageError, match=r"--url .*: expected http\[s\]://"):
            Where(url=url)
    assert Where(url="https://advisor.example/a").url
    # Submitted code runs here by default only if nobody else gets in; a proxy lets others in.
    assert Where().executors == Where(host="::1").executors == ("local",)
    for host in ("0.0.0.0", "127.0.0.1"):
        assert Where(host=host, behind_proxy=True).executors == ("none",)
    getting, setting = 3, 4  # PR_GET_DUMPABLE, PR_SET_DUMPABLE
    control = ctypes.CDLL(None).prctl
    try:
        assert control(setting, 1, 0, 0, 0) == 0
        with servers.socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            assert main(["serve", "--port", port, "--database", lite]) == 2
        assert control(getting, 0, 0, 0, 0) == 0
    finally:
        control(setting, 1, 0, 0, 0)
    assert main(["serve", "--database", lite, "--executor", "slurm"]) == 2
    assert not Path(lite.removeprefix("sqlite:///")).exists()  # nor a token that nobody saw
    address, executor = capsys.readouterr().err.splitlines()
    assert "--executor 'slurm': expected one of local" in executor
    assert re.search(rf"--port {port}: Address already in use", address)
    for port in ("-1", "65536", "x", "", "1.5", "1_0", "８０", "9" * 5000):
        assert main(["serve", "--port", port]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"--port {port[:40]!r}: expected 0 to 65535; 0 takes any free port")


def test_a_token_is_made_beside_the_server(
    lite: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ["token", "gpu-01", "--role", "worker", "--database", lite, "--json"]
    file = Path(lite.removeprefix("sqlite:///"))
    assert main(make) == 2 and not file.exists()
    file.touch()
    assert main(make) == 2  # nor is there a token in it, where no server made the first
    assert capsys.readouterr().err.count("no server has used it; run advisor serve first\n") == 2
    with serving(lite) as served:
        assert main(make) == 0
        made = json.loads(capsys.readouterr().out)
        made["token"] = new_token(Database(lite), "gpu-01", "worker", 30)
        monkeypatch.setenv("ADVISOR_TOKEN", made["token"])
        open_store(served.url).check_writable()
        (last, *_) = served.ask("GET", "/api/audit", "admin").json["events"]
        assert (last["action"], last["by"]) == ("token made", None)
        assert "gpu-01 (worker)" in last["subject"]
    monkeypatch.setenv("ADVISOR_DATABASE", "mysql://x")
    assert main(["token", "x"]) == 2
    assert "expected sqlite" in capsys.readouterr().err


def test_through_tls(tmp_path: Path, lite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = servers.certificate(tmp_path)
    # Of seconds, that it waits for the other side of an open connection to end TLS.
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 0.1)
    with serving(lite, ssl_certfile=str(certificate), ssl_keyfile=str(key)) as served:
        monkeypatch.setenv("ADVISOR_TOKEN", served.tokens["worker"])
        url = f"https://127.0.0.1:{served.port}?timeout=3s"
        with pytest.raises(StoreError, match="certificate"):
            open_store(url).keys()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        store = open_store(url)
        Records(store).put(record())
        assert Records(store).all() == [record()]


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "advisor.service.run", None)
    monkeypatch.delattr("advisor.service.run")
    assert main(["serve"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("run: pip install 'torch-advisor[serve]'\n")
    assert len(said.err.splitlines()) == 1
