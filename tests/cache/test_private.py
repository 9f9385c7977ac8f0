"""Keys that other users may have: they sign records, and run no code."""

from __future__ import annotations

import os
from pathlib import Path

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


def test_others_can_write_a_folder_above_it(file: Path) -> None:
    for mode in (0o770, 0o702):
        file.parent.chmod(mode)
        assert fault(file) == f"others can write {file.parent} (mode {mode:o})" or _is_own(file)
    file.parent.chmod(0o1777)  # as /tmp
    assert fault(file) == ""


def _is_own(file: Path) -> bool:
    """Whether the group of the folder is a private one, which may write it."""
    import grp
    import pwd

    name = pwd.getpwuid(os.geteuid()).pw_name
    return not file.parent.stat().st_mode & 0o002 and name == grp.getgrgid(os.getegid()).gr_name


def test_a_link_counts_with_what_it_leads_through(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts a secret: key -> ..data/key, ..data -> ..2026/."""
    (tmp_path / "..data").symlink_to("folder")
    link = tmp_path / "key"
    link.symlink_to("..data/key")
    assert fault(link) == ""
    far = tmp_path / "far"
    far.symlink_to(file)
    assert fault(far) == ""
    file.parent.chmod(0o777)
    assert fault(link) == fault(far) == f"others can write {file.parent} (mode 777)"
    file.parent.chmod(0o700)
    be_anothers(tmp_path / "..data", monkeypatch)
    assert "is another user's" in fault(link)


def test_what_was_put_in_its_place_meanwhile(file: Path) -> None:
    with file.open("rb") as opened:
        file.unlink()
        file.touch(0o600)
        assert insecure_reason(file, opened.fileno()) == f"{file} was replaced while it was read"


def test_links_in_a_circle(file: Path, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with file.open("rb") as opened:
        assert "a: " in insecure_reason(tmp_path / "a", opened.fileno())


def test_a_seal_knows_which_of_its_keys_others_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("XDG_DATA_HOME", str(data))
    own = KeyRing.from_environment().ready()
    assert own.own and own == own.for_code == KeyRing.from_environment()
    secret = tmp_path / "secret"
    secret.write_text("a secret of a team")
    secret.chmod(0o640)
    monkeypatch.setenv("ADVISOR_SECRET_FILE", str(secret))
    both = KeyRing.from_environment()
    assert both.for_code == both and both.secret and not caplog.records
    secret.chmod(0o444)
    keyring = KeyRing.from_environment()
    assert keyring.secret == both.secret and keyring.signs  # records are signed as ever
    assert (keyring.for_code.secret, keyring.for_code.own) == (b"", own.own)
    data.chmod(0o777)
    keyring = KeyRing.from_environment()
    assert keyring.own == own.own and not keyring.for_code.signs
    assert keyring.exposed == f"others can read {secret} (mode 444)"
    remedy = "run: chmod 600 it, and chmod go-w the folders above it"
    assert [line.getMessage() for line in caplog.records] == [
        f"{secret} holds a secret, and others can read {secret} (mode 444); {remedy}",
        f"{data}/advisor/key holds a secret, and others can write {data} (mode 777); {remedy}",
    ]
    # The same of one that is made there.
    (data / "advisor" / "key").unlink()
    monkeypatch.delenv("ADVISOR_SECRET_FILE")
    made = KeyRing.from_environment().ready()
    assert made.own and made.exposed == f"others can write {data} (mode 777)"
