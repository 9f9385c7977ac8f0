"""Compiled artifacts of records: loaded only if signed with a trusted key, for the same purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cache import exchange
from advisor.cache.artifacts import Artifacts, Label, Purpose, Tools, pack_artifacts
from advisor.cache.artifacts import unpack_artifacts as unpack
from advisor.cache.garbage import find_garbage
from advisor.cache.name import record_key
from advisor.cache.records import Records
from advisor.cache.settings import max_artifacts
from advisor.cache.signing import NO_KEYS, KeyRing
from advisor.cache.stores import BLOBS, ByteStore, open_store
from advisor.cache.stores.disk import PackStore
from advisor.errors import RecordDamaged, StoreError, UsageError
from tests.cache.examples import DEFAULT, ENVIRONMENT, MINE, TEAM, THEIRS, record

TOOLS = Tools(torch="2.11.0", triton="3.6.0", python="3.11.7")
RECORD = record()
PURPOSE = Purpose.of(RECORD, DEFAULT, ENVIRONMENT, TOOLS)
OTHER = replace(PURPOSE, config="ab" * 6)
DATA = b"code " * 1000
GOOD = pack_artifacts(DATA, PURPOSE, MINE)


def artifacts(*stores: ByteStore, keyring: KeyRing = MINE, most: int = 2**20) -> Artifacts:
    return Artifacts(stores, keyring, most)


def blob_name(purpose: Purpose) -> str:
    return MINE.tagged(purpose.label)


def blob_key(purpose: Purpose) -> str:
    return BLOBS + blob_name(purpose)


def put_both(store: ByteStore) -> Purpose:
    """Keep a record and artifacts for its config."""
    Records(store, keyring=MINE).put(RECORD)
    purpose = Purpose.of(RECORD, RECORD.winner("loop").config, ENVIRONMENT, TOOLS)
    artifacts(store).keep(DATA, purpose, store)
    return purpose


def test_kept_artifacts_are_found(store: ByteStore) -> None:
    size = artifacts(store).keep(DATA, PURPOSE, store)
    found = artifacts(store).find(PURPOSE)
    assert found is not None and (found.data, found.size, found.store) == (DATA, size, store.url)
    assert size < len(DATA)
    assert artifacts(store, keyring=TEAM).find(PURPOSE) is not None  # also signed with the own key
    assert artifacts(store, most=0).find(PURPOSE) is None
    assert artifacts(store).find(OTHER) is None
    fed = DEFAULT.replace(pin_memory=True)  # the input pipeline is not compiled
    assert Purpose.of(RECORD, fed, ENVIRONMENT, TOOLS) == PURPOSE


def test_artifacts_for_another_purpose_are_refused() -> None:
    for field, now in {
        **{"torch": "2.12.0", "triton": "", "python": "3.12.1", "driver": "590.2", "kind": "cpu"},
        **{"device": "NVIDIA H100", "capability": "10.0"},
        **{"record": "ab/cd/64", "config": "ab" * 6},
    }.items():
        with pytest.raises(RecordDamaged, match=f"made for {field} .*, here {now or 'none'}"):
            unpack(GOOD, replace(PURPOSE, **{field: now}), MINE)


RECORD_SIGNATURE = GOOD[:20] + MINE.sign(GOOD[52:]) + GOOD[52:]


def test_planted_or_changed_artifacts_are_refused(store: ByteStore) -> None:
    """Even under a trusted name, which anyone can copy from a listing."""
    for packed, says in (
        (b"\0" * 1000, "in an unknown format"),
        (bytes([GOOD[0] ^ 1]) + GOOD[1:], "in an unknown format"),
        (GOOD[:25] + bytes([GOOD[25] ^ 1]) + GOOD[26:], "not signed by you or your team"),
        (GOOD[:60] + bytes([GOOD[60] ^ 1]) + GOOD[61:], "not signed by you or your team"),
        (GOOD[:-1], "not signed by you or your team"),
        (RECORD_SIGNATURE, "not signed by you"),  # a signed record is not signed code
        (pack_artifacts(DATA, PURPOSE, THEIRS), "not signed by you or your team"),
        (pack_artifacts(DATA, PURPOSE, NO_KEYS), "not signed by you or your team"),
        (pack_artifacts(DATA, OTHER, MINE), "made for config"),
        (pack_artifacts(b"\0" * 10**6, PURPOSE, MINE), "too large when unpacked"),
    ):
        store.put(blob_key(PURPOSE), packed)
        with pytest.raises(RecordDamaged, match=says):
            artifacts(store).find(PURPOSE)


def test_oversized_or_unsigned_artifacts_are_not_kept(store: ByteStore, tmp_path: Path) -> None:
    limits = {"most": 10}, {"most": 0}, {"keyring": NO_KEYS}
    for limit in limits:
        assert artifacts(store, **limit).keep(DATA, PURPOSE, store) == 0  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="a pack is read-only"):
        artifacts(store).keep(DATA, PURPOSE, PackStore(tmp_path / "pack"))
    assert store.sizes() == {} and not (tmp_path / "pack").exists()
    artifacts(store).keep(DATA, PURPOSE, store)
    with pytest.raises(RecordDamaged, match="larger than 10 bytes"):
        artifacts(store, most=10).find(PURPOSE)


def test_stores_are_searched_in_order_and_the_first_gets_a_copy(
    store: ByteStore, tmp_path: Path
) -> None:
    first = open_store(f"disk:{tmp_path}/first")
    artifacts(store).keep(DATA, PURPOSE, store)
    first.put(blob_key(PURPOSE), b"rubbish")
    for source in (store, first):
        found = artifacts(first, store).find(PURPOSE)
        assert found is not None and found.store == source.url


def test_artifacts_of_another_key_are_refused(store: ByteStore, tmp_path: Path) -> None:
    """Own artifacts are still found, and other configs are a plain miss."""
    bucket = open_store(f"file://{tmp_path}/bucket")
    for place in (store, bucket):
        artifacts(place, keyring=THEIRS).keep(DATA, PURPOSE, place)
        for keyring in (MINE, NO_KEYS, TEAM):
            with pytest.raises(RecordDamaged, match=r"^artifacts: signed with another"):
                artifacts(place, keyring=keyring).find(PURPOSE)
        assert artifacts(place).find(OTHER) is None
        assert artifacts(place, most=0).find(PURPOSE) is None
    artifacts(store).keep(DATA, PURPOSE, store)
    assert artifacts(bucket, store).find(PURPOSE) is not None


@pytest.mark.parametrize("which", ["own", "secret"])
def test_an_exposed_key_loads_and_signs_no_artifacts(store: ByteStore, which: str) -> None:
    """A second, safe key still loads and signs."""
    why = "others can read /key (mode 644)"
    bare = KeyRing(own=b"m" * 32) if which == "own" else KeyRing(b"a secret of a team")
    exposed = replace(bare, **{f"{which}_exposed": why})
    assert artifacts(store, keyring=exposed).keep(DATA, PURPOSE, store) == 0
    assert artifacts(store, keyring=exposed).unsigned == why
    assert artifacts(store, keyring=NO_KEYS).unsigned and not artifacts(store).unsigned
    assert artifacts(store, keyring=exposed).find(PURPOSE) is None
    for keyring in (bare, THEIRS):  # the error names what can be fixed
        artifacts(store, keyring=keyring).keep(DATA, PURPOSE, store)
        with pytest.raises(RecordDamaged, match=r"artifacts: others can read /key .*; refused"):
            artifacts(store, keyring=exposed).find(PURPOSE)
    both = replace(TEAM, **{f"{which}_exposed": why})
    assert artifacts(store, keyring=both).keep(DATA, PURPOSE, store) > 0
    assert artifacts(store, keyring=both).find(PURPOSE) is not None


def garbage(store: ByteStore, keyring: KeyRing = MINE) -> dict[str, str]:
    found = find_garbage(Records(store, keyring=keyring))
    return {one.name: one.reason for one in found if isinstance(one.key, Label)}


def test_gc_finds_orphaned_and_oversized_artifacts(
    store: ByteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    purpose = put_both(store)
    assert garbage(store) == {}
    other = replace(purpose, config="ab" * 6)
    gone = replace(purpose, record=f"{'ab' * 6}/{'cd' * 6}/1")
    for one in (gone, other):
        artifacts(store).keep(DATA, one, store)
    artifacts(store, keyring=THEIRS).keep(DATA, other, store)
    assert {name: reason.rpartition(": ")[2] for name, reason in garbage(store).items()} == {
        blob_name(gone): "their record is gone",
        blob_name(other): "their config is no longer advised",
    }
    monkeypatch.setenv("ADVISOR_MAX_ARTIFACTS", "10B")
    reason_text = garbage(store)[blob_name(purpose)]
    assert reason_text.startswith("oversized: ")
    assert reason_text.endswith("of artifacts: larger than 10 bytes (ADVISOR_MAX_ARTIFACTS)")


SHOWN = "others can read /key"


@pytest.mark.parametrize(
    ("keyring", "data", "reason", "goes"),
    [
        (MINE, b"\0" * 1000, "in an unknown format", True),
        (MINE, b"advisor artifacts 2\n" + GOOD, "in an unknown format", False),
        (MINE, GOOD[:-1], "not signed by you or your team, or changed since", True),
        (MINE, pack_artifacts(DATA, OTHER, MINE), "made for another record or config", True),
        (THEIRS, GOOD, "signed with another's key", False),
        (replace(MINE, own_exposed=SHOWN), GOOD, SHOWN, False),
    ],
)
def test_damaged_artifacts_are_shown_and_removed(
    store: ByteStore, keyring: KeyRing, data: bytes, reason: str, goes: bool
) -> None:
    """Artifacts signed with other keys are not removed."""
    purpose = put_both(store)
    ((holder, label, _size),) = artifacts(store).listed(purpose.label)
    assert (label.record_id, label.record_key) == (RECORD.id, purpose.record)
    assert artifacts(store).fault(holder, label) == ""
    assert artifacts(store, most=0).fault(holder, label).startswith("none are loaded")
    store.put(label.text, data)
    (label,) = artifacts(store, keyring=keyring).on(store)
    assert label.trusted is (keyring is MINE)
    assert artifacts(store, keyring=keyring).fault(store, label) == reason
    assert {key: why.rpartition(": ")[2] for key, why in garbage(store, keyring).items()} == (
        {label.name: reason} if goes else {}
    )


@pytest.mark.parametrize("other", ["dir:{}/there", "file://{}/there"])
def test_only_own_sound_artifacts_are_copied_to_another_store(
    store: ByteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    purpose = put_both(store)
    artifacts(store, keyring=THEIRS).keep(DATA, purpose, store)
    changed, moved = (replace(purpose, config=one * 6) for one in ("ab", "cd"))
    store.put(blob_key(changed), b"changed since")
    store.put(blob_key(moved), good := pack_artifacts(DATA, purpose, MINE))
    target = open_store(other.format(tmp_path))
    records = Records([store, target], keyring=MINE)

    def copied(*places: str) -> dict[str, str]:
        found = exchange.copy_artifacts(records, store, target, places)
        return {one.name: one.reason or one.outcome for one in found}

    refused = {
        blob_name(changed): "artifacts: in an unknown format; refused",
        blob_name(moved): "artifacts: made for another record or config; refused",
    }
    for outcome in ("added", "known"):
        assert copied(record_key(RECORD)) == {blob_name(purpose): outcome, **refused}
    for damaged in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], good + b"more"):
        target.put(blob_key(purpose), damaged)
        assert copied(record_key(RECORD))[blob_name(purpose)] == "added"
        assert target.get(blob_key(purpose), 2**20) == good
    assert copied() == {}
    monkeypatch.setenv("ADVISOR_MAX_ARTIFACTS", "0")
    assert copied(record_key(RECORD)) == {}
    assert artifacts(target).find(purpose) is not None


def test_the_size_limit_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, most in (("", 64 * 2**20), ("0", 0), ("1GiB", 2**30)):
        monkeypatch.setenv("ADVISOR_MAX_ARTIFACTS", setting)
        assert max_artifacts() == most
    monkeypatch.setenv("ADVISOR_MAX_ARTIFACTS", "much")
    with pytest.raises(UsageError, match=r"ADVISOR_MAX_ARTIFACTS 'much': expected .* or 0 to keep"):
        max_artifacts()
