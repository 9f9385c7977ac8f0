"""Keys that other users may have: they sign records, and run no code."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from advisor.cache.private import insecure_reason
from advisor.cache.signing import KeyRing

ANOTHER = 65534


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    made = folder / "key"
    made.write_bytes(b"k" * 32)
    made.chmod(0o600)
    return made


def fault(file: Path, group_reads: bool = False) -> str:
    with file.open("rb") as opened:
        return insecure_reason(file, opened.fileno(), group_reads)


def be_anothers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)
    else:  # then it is the reader who is another
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)


@pytest.mark.parametrize(
    ("mode", "reads", "said"),
    [
        *((0o600, False, ""), (0o400, False, ""), (0o440, True, ""), (0o640, True, "")),
        *((0o640, False, "read"), (0o604, False, "read"), (0o644, True, "read")),
        *((0o444, True, "read"), (0o620, True, "write"), (0o602, True, "write")),
    ],
)
def test_who_may_read_and_write_it(file: Path, mode: int, reads: bool, said: str) -> None:
    file.chmod(mode)
    expected = f"others can {said} {file} (mode {mode:o})" if said else ""
    assert fault(file, reads) == expected


@pytest.mark.parametrize("which", ["folder/key", "folder", "."])
def test_another_owns_it_or_a_folder_above_it(
    file: Path, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fault(file) == ""
    be_anothers(tmp_path / which, monkeypatch)
    assert "is another user's" in fault(file)


@pytest.mark.parametrize(
    ("mode", "members", "private"),
    [
        (0o702, [], False),
        (0o1777, ["eve"], True),  # as /tmp
        (0o770, [], True),  # of a group of the user alone
        (0o770, ["eve"], False),
    ],
)
def test_others_can_write_a_folder_above_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, mode: int, members: list[str], private: bool
) -> None:
    own = SimpleNamespace(gr_name=pwd.getpwuid(os.geteuid()).pw_name, gr_mem=members)
    monkeypatch.setattr(grp, "getgrgid", lambda _gid: own)
    file.parent.chmod(mode)
    found = "" if private else f"others can write {file.parent} (mode {mode:o})"
    assert fault(file) == found


def test_links_on_the_way(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes mounts a secret: key -> ..data/key, ..data -> ..2026/."""
    links = {"..data": "folder", "key": "..data/key", "far": str(file), "a": "b", "b": "a"}
    for name, to in links.items():
        (tmp_path / name).symlink_to(to)
    link, far = tmp_path / "key", tmp_path / "far"
    assert fault(link) == fault(far) == ""
    file.parent.chmod(0o777)
    assert fault(link) == fault(far) == f"others can write {file.parent} (mode 777)"
    file.parent.chmod(0o700)
    be_anothers(tmp_path / "..data", monkeypatch)
    assert "is another user's" in fault(link)
    with file.open("rb") as opened:  # in a circle
        assert "a: " in insecure_reason(tmp_path / "a", opened.fileno())
        file.unlink()
        file.touch(0o600)
        assert insecure_reason(file, opened.fileno()) == f"{file} was replaced while it was read"


def test_a_key_that_others_may_have_signs_records_and_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data, secret = tmp_path / "data", tmp_path / "secret"
    monkeypatch.setenv("XDG_DATA_HOME", str(data))
    own = KeyRing.from_environment().ready()
    assert own.own and own == own.for_code == KeyRing.from_environment()
    secret.write_text("a secret of a team")
    secret.chmod(0o640)
    monkeypatch.setenv("ADVISOR_SECRET_FILE", str(secret))
    both = KeyRing.from_environment()
    assert both.for_code == both and both.secret and not caplog.records
    secret.chmod(0o444)
    keyring = KeyRing.from_environment()
    assert keyring.secret == both.secret and keyring.signs
    assert (keyring.for_code.secret, keyring.for_code.own) == (b"", own.own)
    data.chmod(0o777)
    keyring = KeyRing.from_environment()
    assert keyring.own == own.own and not keyring.for_code.signs
    remedy = "run chmod 600 on the file, and chmod go-w on the folders above it"
    assert [line.getMessage() for line in caplog.records] == [
        f"{secret} holds a secret, and others can read {secret} (mode 444); {remedy}",
        f"{data}/advisor/key holds a secret, and others can write {data} (mode 777); {remedy}",
    ]
    (data / "advisor" / "key").unlink()
    monkeypatch.delenv("ADVISOR_SECRET_FILE")
    made = KeyRing.from_environment().ready()
    assert made.own and made.exposed == f"others can write {data} (mode 777)"
