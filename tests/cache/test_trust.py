"""Whose record counts: versions of several writers, signatures, names, and what gc removes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cache.codec import encode
from advisor.cache.garbage import garbage
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record, Target
from advisor.cache.records import Records
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.cache.stores import Store, open_store
from advisor.errors import RecordDamaged
from tests.cache.examples import INFER, KEY, SMALL, changed, record

MINE = KeyRing(own=b"m" * 32)
THEIRS = KeyRing(own=b"t" * 32)
TEAM = KeyRing(b"a secret of a team", own=b"n" * 32)
NEW = 1.74e9


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"dir:{tmp_path}/store")


@pytest.fixture
def records(store: Store) -> Records:
    """The reader's own."""
    return Records(store, keyring=MINE)


def put_raw(store: Store, one: Record, keyring: KeyRing = NO_KEYS) -> Name:
    """As somebody writes it who does not ask: whatever clock and claims."""
    data = encode(one, keyring)
    name = Name.of(one, data, keyring)
    store.put(name.text, data)
    return name


@pytest.mark.parametrize(
    "planted",
    [
        record(created=NEW),
        record(created=NEW, effort="exhaustive"),
        record(created=1.7e9, revised=NEW, stale="it is slow"),
        record(created=1.7e9, revised=NEW),
    ],
)
@pytest.mark.parametrize("keyring", [NO_KEYS, THEIRS])
def test_what_others_write_does_not_hide_ones_own(
    store: Store, planted: Record, keyring: KeyRing
) -> None:
    mine = record(effort="quick")
    Records(store, keyring=MINE).put(mine)
    put_raw(store, planted, keyring)
    assert Records(store, keyring=MINE).all() == [mine]
    assert len(store.keys()) == 2


def test_a_name_from_the_future_is_last(store: Store) -> None:
    """Its content is refused anyway; before it is read, it must not stand before the honest."""
    honest = record(created=1.7e9)
    put_raw(store, honest)
    later = replace(honest.provenance, created=4253e7, effort="exhaustive")
    store.put(Name.of(replace(honest, provenance=later), b"x").text, b"rubbish")
    records = Records(store)
    assert records.all() == [honest]
    assert records.damaged == []  # not even looked at


def test_the_team_s_word_is_everybody_s(store: Store) -> None:
    Records(store, keyring=TEAM).put(record(created=1.7e9))
    put_raw(store, record(created=NEW, effort="exhaustive"), THEIRS)
    colleague = KeyRing(b"a secret of a team", own=b"c" * 32)
    (one,) = Records(store, keyring=colleague).all()
    assert one.provenance.created == 1.7e9
    (one,) = Records(store, keyring=THEIRS).all()
    assert one.provenance.created == NEW


def test_a_copied_tag_on_other_bytes_is_refused(records: Records, store: Store) -> None:
    Records(store, keyring=MINE).put(record())
    (text,) = store.keys()
    store.put(text, encode(record(), THEIRS))
    assert records.all() == []
    assert "not what its name" in records.damaged[0]
    name = Name.parse(text, MINE)
    assert name is not None
    with pytest.raises(RecordDamaged):
        records.read(name, encode(record()))


def test_what_was_not_measured_here_is_never_signed(records: Records, store: Store) -> None:
    """explain of a forged record does not make its other claims trusted."""
    put_raw(store, record())
    (seen,) = records.all()
    records.put(replace(seen, parts=(), family="ab", revised=NEW), revises=seen)
    assert not any(name.trusted for name in records.names(store))


def test_what_verify_says_of_somebody_elses_record_is_a_version_without_signature(
    store: Store,
) -> None:
    """It counts for all but the owner and their team, until somebody says otherwise."""
    theirs = record(created=1.7e9)
    put_raw(store, theirs, THEIRS)
    records = Records(store, keyring=MINE)
    stale = replace(theirs, stale="slower now", revised=1.71e9)
    records.put(stale, revises=theirs)
    assert records.all() == [stale]
    assert Records(store, keyring=THEIRS).all() == [theirs]
    other = record(created=1.6e9)
    put_raw(store, other)
    assert records.all() == [other]  # a fresh one counts before it
    assert not any(one.trusted for one in records.held())
    again = replace(stale, stale="", revised=1.72e9)
    records.put(again, revises=stale)
    assert records.all() == [again]


def test_what_verify_says_of_ones_own_record_is_signed(records: Records, store: Store) -> None:
    records.put(record())
    records.put(replace(record(), stale="slower now", revised=1.71e9), revises=record())
    (held,) = records.held()
    assert held.trusted and held.record.stale == "slower now"
    put_raw(store, record(revised=NEW))  # a stranger's: it holds after all
    assert records.all() == [held.record]


def named_too(records: Records, one: Record, target: Target) -> Record:
    """Keep a record under another target's name too."""
    task = replace(one.key.task, target=target.name)
    named = replace(one, key=replace(one.key, task=task), target=target)
    records.put(named, revises=one)
    return named


def test_a_record_has_several_names(records: Records, store: Store) -> None:
    first = record()
    records.put(first)
    target = Target(name="pkg/other.py:Net", origin="fedcba98")
    named = named_too(records, first, target)
    assert records.all() == [first] or records.all() == [named]
    assert len(records.all()) == 1
    assert [one.record for one in records.held(RecordFilter(target="pkg/other.py:Net"))] == [named]
    assert [one.record for one in records.held(RecordFilter(target="model.py:Net"))] == [first]
    copied = named_too(records, first, Target(name="model.py:Net", origin="0a"))
    assert {one.record for one in records.held(RecordFilter(target="model.py:Net"))} == {
        first,
        copied,
    }
    # What verify says of one name is said of all, and every one is the owner's.
    records.put(replace(first, stale="slower now", revised=NEW), revises=first)
    for name in ("pkg/other.py:Net", "model.py:Net"):
        found = records.held(RecordFilter(target=name))
        assert found and all(one.record.stale and one.trusted for one in found)
        assert {one.record.target.name for one in found} == {name}
    # A stranger gives it no name.
    put_raw(store, replace(first, target=Target(name="evil.py:Net", origin="0b")))
    assert records.held(RecordFilter(target="evil.py:Net")) == []


def test_the_own_key_is_made_at_the_first_write_and_kept(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    file.chmod(0o644)
    KeyRing.from_environment()
    assert "others can read" in caplog.text and "chmod 600" in caplog.text


def test_where_no_key_can_be_kept_records_are(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    records = Records(store, keyring=KeyRing.from_environment())
    records.put(record())
    assert records.all() == [record()]
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "relative")
    assert KeyRing.from_environment().own_file is None


def reasons(records: Records, store: Store) -> dict[str, str]:
    return {one.named.text: one.reason for one in garbage(records, store)}  # type: ignore[union-attr]


def test_what_may_go_is_what_one_wrote_oneself(records: Records, store: Store) -> None:
    old, new = record(created=1.7e9), record(created=1.72e9)
    for one in (old, new):
        records.put(one)
    theirs = put_raw(store, record(created=1.71e9), THEIRS)
    put_raw(store, record(created=NEW, effort="exhaustive", stale="says a stranger"))
    found = reasons(records, store)
    (gone,) = found
    name = Name.parse(gone, MINE)
    assert name is not None and name.trusted and name.created == int(1.7e9 * 1e6)
    assert reasons(Records(store, keyring=THEIRS), store) == {}
    assert theirs.text not in found


def test_exhaustive_is_not_removed_for_quick(records: Records, store: Store) -> None:
    best = record(created=1.7e9, effort="exhaustive")
    records.put(best)
    records.put(record(created=1.72e9, effort="quick"))
    kept = [name for name in records.names(store) if name.text not in reasons(records, store)]
    assert [name.effort for name in kept] == [3]
    records.put(replace(best, stale="slower now", revised=1.73e9), revises=best)
    kept = [name for name in records.names(store) if name.text not in reasons(records, store)]
    assert 3 in [name.effort for name in kept]


def test_each_machine_keeps_its_record(store: Store) -> None:
    """Two with different drivers on one store: neither's gc takes the other's."""
    records = Records(store, keyring=TEAM)
    other = changed(KEY, "software.driver", "570.1")
    here, there = record(created=1.7e9), record(created=1.71e9, key=other)
    there = replace(there, provenance=replace(there.provenance, device_uuid="GPU-2"))
    records.put(here)
    records.put(there)
    assert reasons(records, store) == {}
    # The GPU itself has another driver since: what it was under the old one is outlived.
    updated = record(created=1.72e9, key=changed(KEY, "software.driver", "590.2"))
    records.put(updated)
    ((text, reason),) = reasons(records, store).items()
    assert reason == "stale: driver 580.1 -> 590.2 on the same GPU since"
    name = Name.parse(text)
    assert name is not None and name.id == here.key.id
    # Not where it was measured with less effort, or marked stale since.
    records.put(record(created=1.69e9, effort="exhaustive"))
    assert "stale" not in " ".join(
        reason for text, reason in reasons(records, store).items() if "/3." in text
    )


def test_all_names_of_a_record_stay(records: Records, store: Store) -> None:
    records.put(record())
    named_too(records, record(), Target(name="other.py:Net", origin="0a"))
    assert reasons(records, store) == {}
    records.put(record(created=1.72e9))
    assert len(reasons(records, store)) == 1  # the first; the other name has no better version


def test_one_id_names_one_record(records: Records) -> None:
    small = record(key=SMALL)
    for one in (record(), small):
        records.put(one)
    assert record().key.id == small.key.id
    with pytest.raises(Exception, match=rf"several begin so: {KEY.id}@64, {KEY.id}@8"):
        records.get(KEY.id)
    assert records.get(f"{KEY.id}@8") == small
    assert records.get(f"{KEY.id[:4]}@64") == record()
    assert records.get(small.id) == small
    going = records.named(small.id)
    assert records.remove(going) == 1
    assert records.all() == [record()]


def test_a_damaged_record_is_removed_alone(records: Records, store: Store) -> None:
    good, bad = record(), record(key=INFER)
    records.put(good)
    store.put(Name.of(bad, b"rubbish").text, b"rubbish")
    with pytest.raises(RecordDamaged):
        records.get(bad.id)
    assert reasons(records, store) == {}  # somebody else's
    assert records.remove(records.named(bad.id)) == 1
    assert records.all() == [good]


@pytest.mark.parametrize("cut", [b"", b"torn", encode(record(), MINE)[:-1]])
def test_gc_takes_what_one_wrote_and_is_damaged(records: Records, store: Store, cut: bytes) -> None:
    good, bad = record(created=1.7e9), record(created=1.72e9)
    records.put(good)
    records.put(bad)
    (text,) = (name.text for name in records.names(store) if name.created == int(1.72e15))
    store.put(text, cut)
    assert reasons(records, store) == {text: "damaged: its bytes are not what was written"}
    (one,) = garbage(records, store)
    assert (one.kind, one.what) == ("damaged", bad.id)
    one.remove()
    assert records.all() == [good] and not records.damaged


def test_gc_leaves_what_a_newer_version_may_read(records: Records, store: Store) -> None:
    records.put(record())
    strict = Records(store, keyring=MINE, check=lambda _record: "an unknown knob")
    assert strict.all() == [] and reasons(strict, store) == {}


def test_now_is_a_moment(store: Store) -> None:
    one = record(created=time.time())
    Records(store).put(one)
    assert Records(store).all() == [one]
