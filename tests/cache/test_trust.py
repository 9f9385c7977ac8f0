"""Trust: versions by several writers, signatures, names, exposed keys, and gc."""

from __future__ import annotations

import grp
import itertools
import os
import pwd
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from advisor.cache.codec import encode
from advisor.cache.garbage import find_garbage
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record, Target
from advisor.cache.records import Records
from advisor.cache.signing import NO_KEYS, KeyRing, insecure_reason
from advisor.cache.stores import ByteStore
from advisor.errors import RecordDamaged
from tests.cache.examples import MINE, TEAM, THEIRS, record

NEW = 1.74e9


@pytest.fixture
def records(store: ByteStore) -> Records:
    return Records(store, keyring=MINE)


def put_raw(store: ByteStore, one: Record, keyring: KeyRing = NO_KEYS) -> Name:
    """Write a record directly to the store, without the checks of `Records.put`."""
    data = encode(one, keyring)
    name = Name.of(one, data, keyring)
    store.put(name.text, data)
    return name


def test_records_of_others_do_not_replace_own_records(records: Records, store: ByteStore) -> None:
    mine = record(effort="quick")
    records.put(mine)
    planted = [
        record(created=NEW),
        record(created=NEW, effort="exhaustive"),
        record(created=1.7e9, revised=NEW, stale="it is slow"),
        record(created=1.7e9, revised=NEW),
    ]
    for one, keyring in itertools.product(planted, (NO_KEYS, THEIRS)):
        name = put_raw(store, one, keyring)
        assert records.all() == [mine] and len(store.keys()) == 2
        store.delete(name.text)


def test_team_records_win_for_all_team_members(store: ByteStore) -> None:
    Records(store, keyring=TEAM).put(record(created=1.7e9))
    put_raw(store, record(created=NEW, effort="exhaustive"), THEIRS)
    colleague = replace(TEAM, own=b"c" * 32)
    for keyring, created in ((colleague, 1.7e9), (THEIRS, NEW)):
        (one,) = Records(store, keyring=keyring).all()
        assert one.provenance.created == created


def test_a_copied_name_with_other_bytes_is_refused(records: Records, store: ByteStore) -> None:
    records.put(record())
    (text,) = store.keys()
    store.put(text, encode(record(), THEIRS))
    assert records.all() == []
    assert "does not match its name" in records.damaged[0]
    name = Name.parse(text, MINE)
    assert name is not None
    with pytest.raises(RecordDamaged):
        records.read(name, encode(record()))


def test_verifying_the_record_of_another_owner_is_not_signed(
    records: Records, store: ByteStore
) -> None:
    """It applies to all readers except the owner and their team, until the next verification."""
    theirs = record(created=1.7e9)
    put_raw(store, theirs, THEIRS)
    stale = replace(theirs, stale="slower now", revised=1.71e9)
    records.put(stale, revises=theirs)
    assert records.all() == [stale]
    assert Records(store, keyring=THEIRS).all() == [theirs]
    other = record(created=1.6e9)
    put_raw(store, other)
    assert records.all() == [other]  # a valid record is preferred to a stale one
    assert not any(one.trusted for one in records.held())
    again = replace(stale, stale="", revised=1.72e9)
    records.put(again, revises=stale)
    assert records.all() == [again]


def test_verifying_the_own_record_is_signed(records: Records, store: ByteStore) -> None:
    records.put(record())
    records.put(replace(record(), stale="slower now", revised=1.71e9), revises=record())
    (held,) = records.held()
    assert held.trusted and held.record.stale == "slower now"
    put_raw(store, record(revised=NEW))  # a stranger claims that it is valid
    assert records.all() == [held.record]


def put_under_name(records: Records, one: Record, target: Target) -> Record:
    """Store a record under another target name as well."""
    task = replace(one.key.task, target=target.name)
    named = replace(one, key=replace(one.key, task=task), target=target)
    records.put(named, revises=one)
    return named


def test_a_record_can_have_several_names(records: Records, store: ByteStore) -> None:
    def under(name: str) -> list[Record]:
        return [one.record for one in records.held(RecordFilter(target=name))]

    first = record()
    records.put(first)
    named = put_under_name(records, first, Target(name="pkg/other.py:Net", origin="fedcba98"))
    assert records.all() in ([first], [named])
    assert (under("pkg/other.py:Net"), under("model.py:Net")) == ([named], [first])
    copied = put_under_name(records, first, Target(name="model.py:Net", origin="0a"))
    assert {*under("model.py:Net")} == {first, copied}
    # A verification applies to all names, and all stay signed by the owner.
    records.put(replace(first, stale="slower now", revised=NEW), revises=first)
    for name in ("pkg/other.py:Net", "model.py:Net"):
        found = records.held(RecordFilter(target=name))
        assert found and all(one.record.stale and one.trusted for one in found)
        assert {one.record.target.name for one in found} == {name}
    # A stranger cannot add a name.
    put_raw(store, replace(first, target=Target(name="evil.py:Net", origin="0b")))
    assert under("evil.py:Net") == []


def test_the_own_key_is_created_at_the_first_write_and_reused(
    store: ByteStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    file = tmp_path / "data" / "advisor" / "key"
    Records(store, keyring=KeyRing.from_environment()).all()
    assert not file.exists()
    Records(store, keyring=KeyRing.from_environment()).put(record())
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["key"]
    keyring = KeyRing.from_environment()
    assert keyring.own == file.read_bytes() and len(keyring.own) == 32
    assert keyring.ready() is keyring
    (one,) = Records(store, keyring=keyring).held()
    assert one.trusted
    assert not caplog.records


def test_records_work_without_a_place_for_the_key(
    store: ByteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    records = Records(store, keyring=KeyRing.from_environment())
    records.put(record())
    assert records.all() == [record()]
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "relative")
    assert KeyRing.from_environment().own_file is None


def garbage(records: Records) -> dict[str, str]:
    return {one.key.text: one.reason for one in find_garbage(records)}


def test_gc_finds_only_own_superseded_records(records: Records, store: ByteStore) -> None:
    for one in (record(created=1.7e9), record(created=1.72e9)):
        records.put(one)
    put_raw(store, record(created=1.71e9), THEIRS)
    put_raw(store, record(created=NEW, effort="exhaustive", stale="says a stranger"))
    (gone,) = garbage(records)
    name = Name.parse(gone, MINE)
    assert name is not None and name.trusted and name.created == int(1.7e9 * 1e6)
    assert garbage(Records(store, keyring=THEIRS)) == {}


def test_gc_keeps_more_effort_and_other_names(records: Records, store: ByteStore) -> None:
    records.put(record())
    put_under_name(records, record(), Target(name="other.py:Net", origin="0a"))
    assert garbage(records) == {}
    records.put(record(created=1.72e9))
    assert len(garbage(records)) == 1  # not the other name: it has no better version
    best = record(created=1.7e9, effort="exhaustive")
    quick = record(created=1.72e9, effort="quick")
    for one in (best, quick, replace(best, stale="slower now", revised=1.73e9)):
        records.put(one, revises=best if one.stale else None)
        going = garbage(records)
        assert 3 in [name.effort for name in records.names(store) if name.text not in going]


def test_gc_finds_own_damaged_records(records: Records, store: ByteStore) -> None:
    """Records that only fail the check stay: a newer version may read them."""
    good, bad = record(created=1.7e9), record(created=1.72e9)
    records.put(good)
    for cut in (b"", b"torn", encode(record(), MINE)[:-1]):
        records.put(bad)
        (text,) = (name.text for name in records.names(store) if name.created == int(1.72e15))
        store.put(text, cut)
        assert garbage(records) == {text: "damaged: its bytes were changed"}
        (gone,) = find_garbage(records)
        assert (gone.kind, gone.key.record_id) == ("damaged", bad.id)
        assert records.remove([(gone.store, gone.key)]) == [gone.key]
        assert records.all() == [good] and not records.damaged
    strict = Records(store, keyring=MINE, check=lambda _record: "an unknown knob")
    assert strict.all() == [] and garbage(strict) == {}


OTHER_UID = 65534


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    made = folder / "key"
    made.write_bytes(b"k" * 32)
    made.chmod(0o600)
    return made


def reason(file: Path, group_reads: bool = False) -> str:
    with file.open("rb") as opened:
        return insecure_reason(file, opened.fileno(), group_reads)


def give_to_other_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, OTHER_UID, OTHER_UID, follow_symlinks=False)
    else:  # without root, pretend to be another user
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_UID)


def test_key_file_modes(file: Path) -> None:
    for mode, reads, verb in (
        *((0o600, False, ""), (0o400, False, ""), (0o440, True, ""), (0o640, True, "")),
        *((0o640, False, "read"), (0o604, False, "read"), (0o644, True, "read")),
        *((0o444, True, "read"), (0o620, True, "write"), (0o602, True, "write")),
    ):
        file.chmod(mode)
        assert reason(file, reads) == (f"others can {verb} {file} (mode {mode:o})" if verb else "")


@pytest.mark.parametrize("which", ["folder/key", "folder", "."])
def test_a_key_or_folder_of_another_user_is_insecure(
    file: Path, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason(file) == ""
    give_to_other_user(tmp_path / which, monkeypatch)
    assert "is another user's" in reason(file)


def test_keys_in_writable_folders_are_insecure(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(gr_name=pwd.getpwuid(os.geteuid()).pw_name)
    monkeypatch.setattr(grp, "getgrgid", lambda _gid: own)
    for mode, members, private in (
        (0o702, [], False),
        (0o1777, ["eve"], True),  # like /tmp
        (0o770, [], True),  # a group with no other members
        (0o770, ["eve"], False),
    ):
        own.gr_mem = members
        file.parent.chmod(mode)
        found = "" if private else f"others can write {file.parent} (mode {mode:o})"
        assert reason(file) == found


def test_keys_behind_links(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes mounts secrets this way: key -> ..data/key, ..data -> ..2026/."""
    links = {"..data": "folder", "key": "..data/key", "far": str(file), "a": "b", "b": "a"}
    for name, to in links.items():
        (tmp_path / name).symlink_to(to)
    link, far = tmp_path / "key", tmp_path / "far"
    assert reason(link) == reason(far) == ""
    file.parent.chmod(0o777)
    assert reason(link) == reason(far) == f"others can write {file.parent} (mode 777)"
    file.parent.chmod(0o700)
    give_to_other_user(tmp_path / "..data", monkeypatch)
    assert "is another user's" in reason(link)
    with file.open("rb") as opened:  # a link cycle
        assert "a: " in insecure_reason(tmp_path / "a", opened.fileno())
        file.unlink()
        file.touch(0o600)
        assert insecure_reason(file, opened.fileno()) == f"{file} was replaced while it was read"


def test_an_exposed_key_signs_records_but_no_code(
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
    own = data / "advisor" / "key"
    assert [line.getMessage() for line in caplog.records] == [
        f"the secret in {secret} is not safe: others can read {secret} (mode 444); {remedy}",
        f"the secret in {own} is not safe: others can write {data} (mode 777); {remedy}",
    ]
    own.unlink()
    monkeypatch.delenv("ADVISOR_SECRET_FILE")
    made = KeyRing.from_environment().ready()
    assert made.own and made.exposed == f"others can write {data} (mode 777)"
