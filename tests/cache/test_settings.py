"""Where records are kept: what arguments, environment and project say, and what a folder is on."""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from advisor.cache.records import Records
from advisor.cache.settings import cache_urls, on_miss
from advisor.cache.stores import note_on, open_store, open_stores
from advisor.cache.stores.filesystem import network
from advisor.cache.stores.timeout import run_with_timeout
from advisor.cache.stores.url import RemoteUrl, without_password
from advisor.errors import StoreError, UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ADVISOR_CACHE")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("/a", ("/a",)),
        ("/a,b", ("/a,b",)),  # a comma in a name
        ("/a,/b", ("/a", "/b")),
        ("dir:/a, redis://h/0", ("dir:/a", "redis://h/0")),
        (["disk:/a", "dir:/b,s3://c/d"], ("disk:/a", "dir:/b", "s3://c/d")),
    ],
)
def test_lists(text: str | list[str], urls: tuple[str, ...]) -> None:
    assert cache_urls(text) == urls


def test_arguments_come_before_the_environment_before_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.advisor]\ncache = ["dir:records", "redis://host/0"]\non-miss = "nearest"\n'
    )
    inner = tmp_path / "deep" / "er"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[tool.other]\n")
    monkeypatch.chdir(inner)
    assert cache_urls() == (f"dir:{tmp_path}/records", "redis://host/0")
    assert on_miss() == "nearest"
    monkeypatch.setenv("ADVISOR_CACHE", "/env")
    monkeypatch.setenv("ADVISOR_ON_MISS", "error")
    assert cache_urls() == ("/env",)
    assert cache_urls("/given") == ("/given",)
    assert on_miss() == "error"


@pytest.mark.parametrize("script", ["a\0b", "<stdin>", 3, None])
def test_a_script_that_is_no_file_is_in_no_project(
    monkeypatch: pytest.MonkeyPatch, script: object
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=script))
    assert cache_urls() == ()


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("records", "{here}/records"),
        ("./records", "{here}/./records"),
        ("pack:records.pack", "pack:{here}/records.pack"),
        ("/abs", "/abs"),
        ("~/records", "~/records"),
        ("disk:/abs", "disk:/abs"),
        ("s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_paths_of_a_project_are_beside_it(tmp_path: Path, given: str, becomes: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[tool.advisor]\ncache = "{given}"\n')
    (found,) = cache_urls()
    wanted = becomes.format(here=tmp_path)
    assert found == wanted or Path(found) == Path(wanted)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("[tool.advisor]\ncache = 1", True),
        ("[tool.advisor]\ncache = [1]", True),
        ("[tool]\nadvisor = 1", True),
        ("[tool]\nadvisor = []", True),
        ("[tool.advisor]\non_miss = 'nearest'", True),
        ("tool.advisor =", True),
        ("# tool.advisor\na = " + "[" * 100_000, True),
        ("# tool.advisor\ntool = 1", False),
    ],
)
def test_a_wrong_project_is_one_line(tmp_path: Path, text: str, refused: bool) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    for ask in (cache_urls, on_miss) if refused and "cache" not in text else (cache_urls,):
        with (
            pytest.raises(UsageError, match=r"^.*pyproject\.toml.*$") if refused else nullcontext()
        ):
            ask()


def test_on_miss_of_a_project_is_text(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.advisor]\non-miss = 5\n")
    with pytest.raises(
        UsageError, match=r"pyproject\.toml: \[tool.advisor\] on-miss: expected text"
    ):
        on_miss()


def test_remote_stores_alone_are_followed_by_the_user_s_folder(tmp_path: Path) -> None:
    assert [store.url for store in open_stores("redis://h/0")] == ["redis://h/0"]
    urls = [store.url for store in open_stores("redis://h/0", fallback=True)]
    assert urls == ["redis://h/0", f"disk:{tmp_path}/xdg/advisor"]
    both = open_stores(["redis://h/0", "dir:/a"], fallback=True)
    assert [store.url for store in both] == ["redis://h/0", "dir:/a"]
    assert [s.url for s in open_stores()] == [f"disk:{tmp_path}/xdg/advisor"]


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local xfs rw 0 0
none /mnt/with\\040blank lustre rw 0 0
gcs /mnt/bucket fuse.gcsfuse rw 0 0
overlay /over overlay rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x", ""),
        ("/home/me/.cache/advisor", "nfs4"),
        ("/homely", ""),
        ("/home/local/x", ""),
        ("/mnt/with blank/x", "lustre"),
        ("/mnt/bucket", "fuse.gcsfuse"),
        ("/over/x", ""),
    ],
)
def test_network_file_systems(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert network(Path(path), tmp_path / "mounts") == kind
    assert network(Path(path), tmp_path / "no such file") == ""


def test_a_folder_on_one_is_a_folder_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.cache.stores.network", lambda _path: "nfs4")
    store = open_store(str(tmp_path / "new"))
    assert store.url == f"dir:{tmp_path}/new"
    assert "nfs4" in note_on(store)
    assert "SQLite corrupts: use dir:" in note_on(open_store(f"disk:{tmp_path}/new"))


def test_a_bare_path_is_what_lies_there(tmp_path: Path) -> None:
    open_store(f"dir:{tmp_path}/files").put("record/a", b"1")
    open_store(f"disk:{tmp_path}/base").put("record/a", b"1")
    assert open_store(f"{tmp_path}/files").url.startswith("dir:")
    assert open_store(f"{tmp_path}/base").url.startswith("disk:")


def test_urls_are_shown_without_passwords() -> None:
    url = "redis://me:secr@t/x@host:6379/0?prefix=team&ssl_check_hostname=false&timeout=20ms"
    given = RemoteUrl.parse(url, ("prefix", "timeout"))
    assert given.shown.startswith("redis://host:6379/0?prefix=team")
    assert given.bare.endswith("?ssl_check_hostname=false")
    assert given.seconds("timeout", 1.0) == 0.02
    assert open_store("redis://me:secret@host").url == "redis://host"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:s3cr3t@host:1/0", "redis://host:1/0"),
        ("redis:me:s3cr3t@host/0", ""),
        ("redis:/me:s3cr3t@host/0", ""),
        ("redis://me:s3cr3t/x@host/0", ""),
        ("redis://me:s3cr3t?x@host/0", ""),
        ("redis://me:s3cr3t#x@host/0", ""),
        ("redis://me:s3cr3t", ""),
        ("redis://host/0?password=s3cr3t", "redis://host/0?password=***"),
        ("redis://host/0?username=u&ssl_password=s3cr3t&timeout=soon", ""),
        ("redis://host/abc?password=s3cr3t", ""),
        (
            "redis://h/0?prefix=team&ttl=90d&timeout=2s",
            "redis://h/0?prefix=team&ttl=90d&timeout=2s",
        ),
        ("s3://b/x?sig=s3cr3t&timeout=1s", "s3://b/x?sig=***&timeout=1s"),
        ("s3://b/x?X-Amz-Credential=s3cr3t", "s3://b/x?X-Amz-Credential=***"),
        ("az://b?sv=s3cr3t;sas=s3cr3t", "az://b?sv=***;sas=***"),
        ("s3://b?endpoint=https://me:s3cr3t@h:9000", "s3://b?endpoint=https://h:9000"),
        ("redis://h/0?prefix=me:s3cr3t@h", ""),
        ("s3://b?pw=s3cr3t#s3cr3t", "s3://b?pw=***"),
    ],
)
def test_no_secret_is_ever_shown(url: str, shown: str) -> None:
    assert "s3cr3t" not in without_password(url)
    assert not shown or without_password(url) == shown
    try:
        assert "s3cr3t" not in open_store(url).url
    except UsageError as exc:
        assert "s3cr3t" not in str(exc)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h?ttl=soon", "ttl=soon: expected a time"),
        ("redis://h?timeout=0ms", "expected a time"),
        ("redis://h?prefix=a*", "expected a plain name"),
        ("redis://h?prefix=a&prefix=b", "given twice"),
        ("redis://h:port", "port: expected a number from 1 to 65535"),
        ("redis://h:0", "port 0: expected a number from 1 to 65535"),
        ("https://h:65536", "port 65536: expected"),
        ("http://h:-1/x", "port -1: expected"),
        ("s3://b?endpoint=http://h:99999", "port 99999: expected"),
        ("s3://b?endpoint=h:9000", r"endpoint: expected https://HOST"),
        ("redis://h/abc", "database 'abc': expected a number"),
        ("redis://u:secret@h?x", "expected SCHEME://"),
        ("http://[::1", "expected SCHEME://"),
        ("redis://[::1", "expected SCHEME://"),
    ],
)
def test_wrong_urls(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_what_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("redis", "s3fs") else find(name)
    )
    for url, extra in (("redis://h", "redis"), ("s3://b", "s3")):
        with pytest.raises(UsageError, match=rf"pip install 'advisor\[{extra}\]'") as caught:
            open_store(url)
        assert "\n" not in str(caught.value)


def test_waiting_ends() -> None:
    assert run_with_timeout(5.0, lambda: 1, "x", lambda _late: None) == 1
    with pytest.raises(StoreError, match="gone"):
        run_with_timeout(5.0, lambda: _fail(), "x", lambda _late: None)
    came: list[int] = []
    release = threading.Event()

    def slow() -> int:
        release.wait(10)
        return 2

    began = time.monotonic()
    with pytest.raises(StoreError, match="no answer within 20 ms"):
        run_with_timeout(0.02, slow, "x", came.append)
    assert time.monotonic() - began < 5
    release.set()
    while not came:
        time.sleep(0.01)
    assert came == [2]


def _fail() -> None:
    raise StoreError("gone")


def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = open_store(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"[Tt]imeout"):
            store.keys()


def test_a_project_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pyproject.toml")
    with pytest.raises(UsageError, match="not a regular file"):
        cache_urls()


def test_folders_may_be_paths(tmp_path: Path) -> None:
    assert cache_urls(tmp_path / "a, b") == (f"{tmp_path}/a, b",)
    assert cache_urls([tmp_path, "redis://h"]) == (str(tmp_path), "redis://h")
    for wrong in (5, b"x", [5], object()):
        with pytest.raises(UsageError, match="expected a folder"):
            cache_urls(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "", ".x", "0a.journal.lock.x", "0a\n"])
def test_a_study_lies_beside_its_records(tmp_path: Path, name: str) -> None:
    records = Records(open_store(f"dir:{tmp_path}/s"))
    assert records.study("0a1b@64-2.journal") == tmp_path / "s" / "studies" / "0a1b@64-2.journal"
    with pytest.raises(UsageError, match="expected KEY@BATCH"):
        records.study(name)


def test_a_planted_link_among_studies_is_not_followed(tmp_path: Path) -> None:
    records = Records(open_store(f"dir:{tmp_path}/s"))
    (tmp_path / "s" / "studies").mkdir(parents=True)
    (tmp_path / "s" / "studies" / "0a.journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link and is not followed"):
        records.study("0a.journal")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "studies").symlink_to(tmp_path)
    planted = Records(open_store(f"dir:{tmp_path}/t"))
    for act in (lambda: planted.studies, lambda: planted.study("0b.journal")):
        with pytest.raises(StoreError, match="is a link and is not followed"):
            act()


def test_a_planted_lock_leads_nowhere(tmp_path: Path) -> None:
    from advisor.persistence import locked

    folder = tmp_path / "studies"
    folder.mkdir()
    outside = tmp_path / "outside"
    (folder / "0a@64.lock").symlink_to(outside)
    with pytest.raises(StoreError, match="is a link"), locked(folder, "0a@64"):
        pass
    with pytest.raises(UsageError, match="expected KEY@BATCH"), locked(folder, "../outside"):
        pass
    assert not outside.exists()
