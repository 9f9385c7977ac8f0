"""What was compiled for a record: read only where one's own key signed it, for the very same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from advisor.cache import exchange
from advisor.cache.artifacts import (
    Artifacts,
    Label,
    Purpose,
    Tools,
    pack_artifacts,
    unpack_artifacts,
)
from advisor.cache.config import Config
from advisor.cache.garbage import garbage
from advisor.cache.name import record_key
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.seal import NO_KEYS, KeyRing
from advisor.cache.settings import max_artifacts
from advisor.cache.stores import BLOBS, Store, open_store
from advisor.cache.stores.pack import PackStore
from advisor.errors import RecordDamaged, UsageError
from tests.cache.examples import DEFAULT, ENVIRONMENT, record

MINE = KeyRing(own=b"m" * 32)
THEIRS = KeyRing(own=b"t" * 32)
TEAM = KeyRing(b"a secret of a team", own=b"m" * 32)
TOOLS = Tools(torch="2.11.0", triton="3.6.0", python="3.11.7")
RECORD = record()
PURPOSE = Purpose.of(RECORD, DEFAULT, ENVIRONMENT, TOOLS)
DATA = b"code " * 1000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"dir:{tmp_path}/store")


def artifacts(*stores: Store, keyring: KeyRing = MINE, most: int = 2**20) -> Artifacts:
    return Artifacts(stores, keyring, most)


def text(purpose: Purpose, keyring: KeyRing) -> str:
    return f"{purpose.label}.{keyring.tags(purpose.label)[0]}"


def key(purpose: Purpose, keyring: KeyRing) -> str:
    return BLOBS + text(purpose, keyring)


def test_what_was_kept_is_found(store: Store) -> None:
    size = artifacts(store).keep(DATA, PURPOSE, store)
    found = artifacts(store).find(PURPOSE)
    assert found is not None and (found.data, found.size, found.store) == (DATA, size, store.url)
    assert size < len(DATA)
    assert artifacts(store, keyring=TEAM).find(PURPOSE) is not None  # by one's own key too
    assert artifacts(store, most=0).find(PURPOSE) is None
    assert artifacts(store).find(replace(PURPOSE, config="ab" * 6)) is None


@pytest.mark.parametrize(
    ("field", "now"),
    [
        *(("torch", "2.15.0"), ("triton", ""), ("python", "3.12.1"), ("driver", "590.2")),
        *(("device", "NVIDIA H100"), ("capability", "10.0"), ("kind", "cpu")),
        *(("record", "ab/cd/64"), ("config", "ab" * 6)),
    ],
)
def test_of_anything_else_they_are_refused(field: str, now: str) -> None:
    here = replace(PURPOSE, **{field: now})
    with pytest.raises(RecordDamaged, match=f"made for {field} .*, here {now or 'none'}"):
        unpack_artifacts(pack_artifacts(DATA, PURPOSE, MINE), here, MINE)


@pytest.mark.parametrize("at", [0, 25, 60, -1])
def test_what_was_changed_is_refused_before_it_is_read(at: int) -> None:
    good = pack_artifacts(DATA, PURPOSE, MINE)
    bad = bytearray(good)
    bad[at] ^= 1
    with pytest.raises(RecordDamaged, match=r"none that this version reads|not signed by you"):
        unpack_artifacts(bytes(bad), PURPOSE, MINE)
    assert unpack_artifacts(good, PURPOSE, MINE) == DATA


@pytest.mark.parametrize("keyring", [NO_KEYS, THEIRS, KeyRing(b"a secret of another team")])
def test_nobody_plants_them(store: Store, keyring: KeyRing) -> None:
    """A name can be copied from a listing, and what is signed from one place to another."""
    store.put(key(PURPOSE, MINE), pack_artifacts(DATA, PURPOSE, keyring))
    with pytest.raises(RecordDamaged, match="not signed by you or your team"):
        artifacts(store).find(PURPOSE)
    other = replace(PURPOSE, config="ab" * 6)
    store.put(key(PURPOSE, MINE), pack_artifacts(DATA, other, MINE))
    with pytest.raises(RecordDamaged, match="made for config"):
        artifacts(store).find(PURPOSE)


def test_a_signed_record_is_no_signed_code() -> None:
    good = pack_artifacts(DATA, PURPOSE, MINE)
    start, body = good[:20], good[52:]
    with pytest.raises(RecordDamaged, match="not signed"):
        unpack_artifacts(start + MINE.sign(body) + body, PURPOSE, MINE)


def test_what_is_too_large_or_unsigned_is_not_kept(store: Store, tmp_path: Path) -> None:
    assert artifacts(store, most=10).keep(DATA, PURPOSE, store) == 0
    assert artifacts(store, most=0).keep(DATA, PURPOSE, store) == 0
    assert artifacts(store, keyring=NO_KEYS).keep(DATA, PURPOSE, store) == 0
    assert artifacts(store).keep(DATA, PURPOSE, PackStore(tmp_path / "pack")) == 0
    assert store.sizes() == {}
    artifacts(store).keep(DATA, PURPOSE, store)
    with pytest.raises(RecordDamaged, match="larger than 10 bytes"):
        artifacts(store, most=10).find(PURPOSE)


def test_what_unpacks_without_end_is_refused() -> None:
    with pytest.raises(RecordDamaged, match="too large when unpacked"):
        unpack_artifacts(pack_artifacts(b"\0" * 10**6, PURPOSE, MINE), PURPOSE, MINE)


def test_stores_are_looked_through_in_order_and_the_first_keeps_it(
    store: Store, tmp_path: Path
) -> None:
    first = open_store(f"disk:{tmp_path}/first")
    artifacts(store).keep(DATA, PURPOSE, store)
    first.put(key(PURPOSE, MINE), b"rubbish")
    found = artifacts(first, store).find(PURPOSE)
    assert found is not None and found.store == store.url
    again = artifacts(first, store).find(PURPOSE)
    assert again is not None and again.store == first.url


def test_of_what_only_another_signed_it_is_said(store: Store, tmp_path: Path) -> None:
    """Not where there is one's own, or nothing for this very record and config."""
    bucket = open_store(f"memory://{tmp_path}/bucket")
    for there in (store, bucket):
        artifacts(there, keyring=THEIRS).keep(DATA, PURPOSE, there)
        for keyring in (MINE, NO_KEYS, TEAM):
            with pytest.raises(RecordDamaged, match=r"^artifacts: signed with another"):
                artifacts(there, keyring=keyring).find(PURPOSE)
        assert artifacts(there).find(replace(PURPOSE, config="ab" * 6)) is None
        assert artifacts(there, most=0).find(PURPOSE) is None
    artifacts(store).keep(DATA, PURPOSE, store)
    assert artifacts(bucket, store).find(PURPOSE) is not None


@pytest.mark.parametrize("which", ["own", "secret"])
def test_a_key_that_others_may_have_runs_no_code(store: Store, which: str) -> None:
    """Neither what it signed is loaded, nor is anything signed with it; another key does both."""
    why = "others can read /key (mode 644)"
    bare = KeyRing(own=b"m" * 32) if which == "own" else KeyRing(b"a secret of a team")
    shown = replace(bare, **{f"{which}_exposed": why})
    assert artifacts(store, keyring=shown).keep(DATA, PURPOSE, store) == 0
    assert artifacts(store, keyring=shown).unsigned == why
    assert artifacts(store, keyring=NO_KEYS).unsigned and not artifacts(store).unsigned
    assert artifacts(store, keyring=shown).find(PURPOSE) is None  # nothing there, nothing to say
    artifacts(store, keyring=bare).keep(DATA, PURPOSE, store)
    with pytest.raises(RecordDamaged, match=r"artifacts: others can read /key .*; refused"):
        artifacts(store, keyring=shown).find(PURPOSE)
    artifacts(store, keyring=THEIRS).keep(DATA, PURPOSE, store)  # of that it is said, not of this
    with pytest.raises(RecordDamaged, match=r"artifacts: others can read /key .*; refused"):
        artifacts(store, keyring=shown).find(PURPOSE)
    both = replace(TEAM, **{f"{which}_exposed": why})
    assert artifacts(store, keyring=both).keep(DATA, PURPOSE, store) > 0
    assert artifacts(store, keyring=both).find(PURPOSE) is not None


def put(store: Store, one: Record, keyring: KeyRing = MINE) -> Purpose:
    Records(store, keyring=keyring).put(one)
    purpose = Purpose.of(one, one.winner("loop").config, ENVIRONMENT, TOOLS)
    artifacts(store, keyring=keyring).keep(DATA, purpose, store)
    return purpose


def test_gc_takes_what_no_record_leads_to(store: Store) -> None:
    purpose = put(store, RECORD)
    records = Records(store, keyring=MINE)
    assert garbage(records, store) == []
    gone, other = replace(purpose, record="ab/cd/1"), replace(purpose, config="ab" * 6)
    for one in (replace(gone, record=f"{'ab' * 6}/{'cd' * 6}/1"), other):
        artifacts(store).keep(DATA, one, store)
    artifacts(store, keyring=THEIRS).keep(DATA, other, store)
    found = {one.named.name: one.reason for one in garbage(records, store)}  # type: ignore[union-attr]
    said = sorted(reason.rpartition(": ")[2] for reason in found.values())
    assert said == ["their config is advised no more", "their record is gone"]
    assert text(other, MINE) in found and text(other, THEIRS) not in found


def test_gc_takes_what_is_larger_than_permitted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, RECORD)
    monkeypatch.setenv("ADVISOR_MAX_ARTIFACTS", "10B")
    (one,) = garbage(Records(store, keyring=MINE), store)
    assert one.kind == "oversized"
    assert one.reason.endswith("of artifacts: larger than 10 bytes (ADVISOR_MAX_ARTIFACTS)")


GOOD = pack_artifacts(DATA, PURPOSE, MINE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\0" * 1000, "none that this version reads"),
        (GOOD[:-1], "not signed by you or your team, or changed since"),
        (pack_artifacts(DATA, PURPOSE, THEIRS), "not signed by you or your team, or changed since"),
        (
            pack_artifacts(DATA, replace(PURPOSE, config="ab" * 6), MINE),
            "made for another record or config",
        ),
    ],
)
def test_what_is_damaged_is_told_and_tidied(store: Store, data: bytes, reason: str) -> None:
    purpose = put(store, RECORD)
    found = artifacts(store)
    ((there, label, _size),) = found.listed({purpose.record})
    assert found.fault(there, label) == ""
    store.put(label.text, data)
    assert found.fault(there, label) == reason
    (one,) = garbage(Records(store, keyring=MINE), store)
    assert (one.named, one.kind) == (label, "damaged") and one.reason.endswith(f": {reason}")


def test_what_is_not_ones_own_to_judge_is_told_and_stays(store: Store) -> None:
    """Of another key, of a later version of advisor, of a key that others may have."""
    purpose = put(store, RECORD)
    artifacts(store, keyring=THEIRS).keep(DATA, purpose, store)
    store.put(key(purpose, MINE), b"advisor artifacts 2\n" + GOOD)
    found = artifacts(store)
    faults = {
        label.name: found.fault(at, label) for at, label, _n in found.listed({purpose.record})
    }
    assert faults == {
        text(purpose, MINE): "none that this version reads",
        text(purpose, THEIRS): "signed with another's key",
    }
    assert garbage(Records(store, keyring=MINE), store) == []
    shown = replace(MINE, own_exposed="others can read /key (mode 644)")
    label = Label.parse(text(purpose, MINE), shown.for_code)
    assert label is not None
    assert artifacts(store, keyring=shown).fault(store, label) == shown.own_exposed
    trusted = structs.replace(label, trusted=True)
    assert artifacts(store, most=0).fault(store, trusted).startswith("none are")


def test_only_what_one_signed_is_carried(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    purpose = put(store, RECORD)
    artifacts(store, keyring=THEIRS).keep(DATA, purpose, store)
    changed, moved = (replace(purpose, config=one * 6) for one in ("ab", "cd"))
    store.put(key(changed, MINE), b"changed since")
    store.put(key(moved, MINE), pack_artifacts(DATA, purpose, MINE))
    there = open_store(f"dir:{tmp_path}/there")
    records = Records([store, there], keyring=MINE)
    for outcome in ("added", "known"):
        found = exchange.carry_artifacts(records, store, there, {record_key(RECORD)})
        assert {one.name: (one.outcome, one.reason) for one in found} == {
            text(purpose, MINE): (outcome, ""),
            text(changed, MINE): (
                "refused",
                "artifacts: none that this version reads; refused",
            ),
            text(moved, MINE): (
                "refused",
                "artifacts: made for another record or config; refused",
            ),
        }
    assert list(exchange.carry_artifacts(records, store, there, set())) == []
    monkeypatch.setenv("ADVISOR_MAX_ARTIFACTS", "0")
    assert list(exchange.carry_artifacts(records, store, there, {record_key(RECORD)})) == []
    assert artifacts(there).find(purpose) is not None


@pytest.mark.parametrize("other", ["dir:{}/there", "memory://{}/there"])
def test_a_damaged_copy_is_mended(store: Store, tmp_path: Path, other: str) -> None:
    """Of the same size, so that only its bytes tell."""
    purpose = put(store, RECORD)
    there = open_store(other.format(tmp_path))
    name, good = text(purpose, MINE), pack_artifacts(DATA, purpose, MINE)
    records = Records([store, there], keyring=MINE)
    for damaged in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], good + b"more"):
        there.put(BLOBS + name, damaged)
        for outcome in ("updated", "known"):
            (one,) = exchange.carry_artifacts(records, store, there, {record_key(RECORD)})
            assert (one.name, one.outcome) == (name, outcome)
        assert there.get(BLOBS + name, 2**20) == good


def test_how_the_input_comes_is_not_compiled() -> None:
    fed = replace(RECORD, input=Config(pin_memory=True))
    advised = DEFAULT.replace(pin_memory=True)
    assert Purpose.of(fed, advised, ENVIRONMENT, TOOLS) == Purpose.of(
        fed, DEFAULT, ENVIRONMENT, TOOLS
    )


def test_labels() -> None:
    label = Label.parse(text(PURPOSE, MINE), MINE)
    assert label is not None and label.trusted and label.record_id == RECORD.id
    assert (label.record_key, label.config) == (PURPOSE.record, PURPOSE.config)
    theirs = Label.parse(text(PURPOSE, THEIRS), MINE)
    assert theirs is not None and not theirs.trusted
    assert Label.parse("elsewhere") is None


@pytest.mark.parametrize(("said", "most"), [("", 64 * 2**20), ("0", 0), ("1GiB", 2**30)])
def test_how_large_they_may_be(said: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADVISOR_MAX_ARTIFACTS", said)
    assert max_artifacts() == most
    monkeypatch.setenv("ADVISOR_MAX_ARTIFACTS", "much")
    with pytest.raises(UsageError, match=r"ADVISOR_MAX_ARTIFACTS 'much': expected .* or 0 to keep"):
        max_artifacts()
