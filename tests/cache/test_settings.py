"""Store settings: URLs from arguments, environment and pyproject.toml; network file systems."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from advisor.cache.records import Records
from advisor.cache.settings import cache_urls
from advisor.cache.stores import open_store, open_stores, store_note
from advisor.cache.stores.filesystem import network, study_file
from advisor.cache.stores.url import without_password
from advisor.errors import StoreError, UsageError
from advisor.persistence import locked


@pytest.fixture(autouse=True)
def no_cache_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ADVISOR_CACHE")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("/a", ("/a",)),
        ("/a,b", ("/a,b",)),  # a comma in a name
        ("/a,/b", ("/a", "/b")),
        ("dir:/a, redis://h/0", ("dir:/a", "redis://h/0")),
        (["disk:/a", "dir:/b,s3://c/d"], ("disk:/a", "dir:/b", "s3://c/d")),
        (Path("/a, b"), ("/a, b",)),
        ([Path("/a, /b"), "redis://h"], ("/a, /b", "redis://h")),
        *((wrong, "expected a URL on each side of a comma") for wrong in (",", "dir:/a,", ",/a")),
        *((wrong, "on each side of a comma") for wrong in ("/a,,/b", "redis://u:s3cr3t@h,")),
        *((wrong, "expected a folder") for wrong in (5, b"x", [5], object())),
    ],
)
def test_lists_of_urls_are_split_and_checked(given: Any, urls: tuple[str, ...] | str) -> None:
    if isinstance(urls, tuple):
        assert cache_urls(given) == urls
        return
    with pytest.raises(UsageError, match=urls) as caught:
        cache_urls(given)
    assert "s3cr3t" not in str(caught.value)


def test_arguments_beat_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.advisor]\ncache = ["dir:records", "redis://host/0"]\n'
    )
    inner = tmp_path / "deep" / "er"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[tool.other]\n")
    monkeypatch.chdir(inner)
    assert cache_urls() == (f"dir:{tmp_path}/records", "redis://host/0")
    monkeypatch.setenv("ADVISOR_CACHE", "/env")
    assert cache_urls() == ("/env",)
    assert cache_urls("/given") == ("/given",)


def test_project_paths_are_relative_to_pyproject(tmp_path: Path) -> None:
    for given, becomes in {
        "records": f"{tmp_path}/records",
        "./records": f"{tmp_path}/records",
        "pack:records.pack": f"pack:{tmp_path}/records.pack",
        **{one: one for one in ("/abs", "~/records", "disk:/abs", "s3://bucket/x")},
    }.items():
        (tmp_path / "pyproject.toml").write_text(f'[tool.advisor]\ncache = "{given}"\n')
        (found,) = cache_urls()
        assert found == becomes or Path(found) == Path(becomes)


def test_invalid_pyproject_settings_are_refused(tmp_path: Path) -> None:
    for text in (
        "[tool.advisor]\ncache = 1",
        "[tool.advisor]\ncache = [1]",
        "[tool]\nadvisor = 1",
        "[tool]\nadvisor = []",
        "[tool.advisor]\ncaches = 'dir:/a'",
        "tool.advisor =",
        "# tool.advisor\na = " + "[" * 100_000,
    ):
        (tmp_path / "pyproject.toml").write_text(text)
        with pytest.raises(UsageError, match=r"^.*pyproject\.toml.*$"):
            cache_urls()
    (tmp_path / "pyproject.toml").write_text("# tool.advisor\ntool = 1")
    assert cache_urls() == ()


def test_only_remote_stores_get_the_users_folder_as_fallback(tmp_path: Path) -> None:
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


def test_network_file_systems_are_detected(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    for path, kind in {
        "/var/x": "",
        "/home/me/.cache/advisor": "nfs4",
        "/homely": "",
        "/home/local/x": "",
        "/mnt/with blank/x": "lustre",
        "/mnt/bucket": "fuse.gcsfuse",
        "/over/x": "",
    }.items():
        assert network(Path(path), tmp_path / "mounts") == kind
        assert network(Path(path), tmp_path / "no such file") == ""


def test_network_folders_become_dir_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.cache.stores.network", lambda _path: "nfs4")
    store = open_store(str(tmp_path / "new"))
    assert store.url == f"dir:{tmp_path}/new"
    assert "nfs4" in store_note(store)
    assert "SQLite corrupts: use dir:" in store_note(open_store(f"disk:{tmp_path}/new"))


def test_a_bare_path_opens_the_existing_kind_of_store(tmp_path: Path) -> None:
    for kind in ("dir", "disk"):
        open_store(f"{kind}:{tmp_path}/{kind}").put("record/a", b"1")
        assert open_store(f"{tmp_path}/{kind}").url.startswith(f"{kind}:")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        *((f"redis:{rest}", "") for rest in ("me:s3cr3t@host/0", "/me:s3cr3t@host/0")),
        *((f"redis://me:s3cr3t{rest}", "") for rest in ("", "/x@host/0", "?x@host/0", "#x@host/0")),
        ("redis://me:s3cr3t@host:1/0", "redis://host:1/0"),
        ("redis://host/0?password=s3cr3t", "redis://host/0?password=***"),
        ("redis://host/0?username=u&ssl_password=s3cr3t&timeout=soon", ""),
        ("redis://host/abc?password=s3cr3t", ""),
        ("s3://b/x?sig=s3cr3t&timeout=1s", "s3://b/x?sig=***&timeout=1s"),
        ("s3://b/x?X-Amz-Credential=s3cr3t", "s3://b/x?X-Amz-Credential=***"),
        ("az://b?sv=s3cr3t;sas=s3cr3t", "az://b?sv=***;sas=***"),
        ("s3://b?endpoint=https://me:s3cr3t@h:9000", "s3://***"),
        ("redis://h/0?prefix=me:s3cr3t@h", ""),
        ("s3://b?pw=s3cr3t#s3cr3t", "s3://b?pw=***"),
        *((url, url) for url in ("http://advisor.team?insecure=1", "http://[::1]:8765")),
        ("redis://h/0?prefix=team&ttl=90d&timeout=2s",) * 2,
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
        ("redis://h?ttl=soon", "ttl 'soon': expected a time"),
        ("redis://h?timeout=0ms", "expected a time"),
        ("redis://h?prefix=a&prefix=b", "given twice"),
        *((f"redis://h:{port}", "a port from 1 to 65535") for port in ("port", 0, 65536, "-1/x")),
        ("redis://h/abc", "database 'abc': expected a number"),
        *((url, "expected SCHEME://") for url in ("redis://u:secret@h?x", "http://[::1")),
        ("http://advisor.team", "sent unencrypted"),
        ("https://user:secret@advisor.team", "goes into ADVISOR_TOKEN"),
        ("https://advisor.team?token=secret", "timeout and insecure alone"),
        ("https:advisor.team", "expected https://"),
        ("http://", "names no place, expected e.g. http://host"),
        ("s3:///", "names no place"),
        ("https://:443/x", r"expected https://HOST\[:PORT\]"),
        ("memory://x", "a store in memory ends with its process; set ADVISOR_CACHE to a"),
    ],
)
def test_invalid_urls_are_refused(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_an_invalid_endpoint_gives_one_error_line() -> None:
    for endpoint in ("h:9000", "http://h:99999", "http://[::1"):
        with pytest.raises(StoreError) as caught:
            open_store(f"s3://b?endpoint={endpoint}").keys()
        assert "\n" not in str(caught.value) and endpoint in str(caught.value)


def test_a_missing_package_gives_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("redis", "s3fs") else find(name)
    )
    for url, extra in (("redis://h", "redis"), ("s3://b", "s3")):
        with pytest.raises(UsageError, match=rf"pip install 'torch-advisor\[{extra}\]'") as caught:
            open_store(url)
        assert "\n" not in str(caught.value)


def test_a_silent_server_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = open_store(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"[Tt]imeout"):
            store.keys()


def test_studies_are_stored_next_to_the_records(tmp_path: Path) -> None:
    folder = Records(open_store(f"dir:{tmp_path}/s")).studies
    assert study_file(folder, "0a1b@64-2.journal") == tmp_path / "s/studies/0a1b@64-2.journal"
    for name in ("../x", "/etc/x", "a/b", "", ".x", "0a.journal.lock.x", "0a\n"):
        with pytest.raises(UsageError, match="expected KEY@BATCH"):
            study_file(folder, name)


def test_symbolic_links_among_studies_are_not_followed(tmp_path: Path) -> None:
    records = Records(open_store(f"dir:{tmp_path}/s"))
    folder, outside = tmp_path / "s" / "studies", tmp_path / "outside"
    folder.mkdir(parents=True)
    for name in ("0a.journal", "0a@64.lock"):
        (folder / name).symlink_to(outside)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "studies").symlink_to(tmp_path)
    planted = Records(open_store(f"dir:{tmp_path}/t"))
    for act in (
        lambda: study_file(records.studies, "0a.journal"),
        lambda: locked(folder, "0a@64").__enter__(),
        lambda: planted.studies,
        lambda: study_file(tmp_path / "t" / "studies", "0b.journal"),
    ):
        with pytest.raises(StoreError, match="is a link"):
            act()
    with pytest.raises(UsageError, match="expected KEY@BATCH"), locked(folder, "../outside"):
        pass
    assert not outside.exists()
