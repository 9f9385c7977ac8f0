"""Record versions, several stores, refused records, and copying between stores."""

from __future__ import annotations

import errno
import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cache import exchange
from advisor.cache.codec import encode
from advisor.cache.match import Query, best
from advisor.cache.name import Name, ranked
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.signing import KeyRing
from advisor.cache.stores import ByteStore, open_store
from advisor.cache.stores.disk import DiskStore, PackStore, write_pack
from advisor.cache.stores.filesystem import write_whole
from advisor.errors import RecordDamaged, StoreDamaged, StoreError, UsageError
from tests.cache.examples import ENVIRONMENT, INFER, KEY, SMALL, record

VERSIONS = [
    record(created=1.7e9),
    record(created=1.72e9),
    record(created=1.65e9, effort="exhaustive"),
    record(created=1.73e9, effort="quick"),
    record(created=1.65e9, effort="exhaustive", stale="slower now", revised=1.74e9),
    record(created=1.7e9, revised=1.71e9),
    record(created=1.6e9, effort="a later version's"),
]


def name_of(one: Record) -> Name:
    return Name.of(one, encode(one))


def test_ranking_of_record_versions(tmp_path: Path) -> None:
    for one in VERSIONS:
        assert Name.parse(name_of(one).text) == name_of(one)
    for text in ("", "record/a/b/c", name_of(VERSIONS[0]).text + "0", "study/x"):
        assert Name.parse(text) is None
    for stored, winner in (
        ((0, 1), 1),  # newer
        ((0, 1, 2), 2),  # more effort beats newer
        ((1, 3), 1),  # less effort loses, though newer
        ((2, 4, 0), 0),  # stale: another measurement wins
        ((4, 2), 4),  # a verification replaces its measurement
        ((0, 5), 5),
        ((6, 3), 3),
    ):
        for order in itertools.permutations(stored):
            assert ranked(name_of(VERSIONS[n]) for n in order)[0] == name_of(VERSIONS[winner])
        records = Records(open_store(f"dir:{tmp_path}/{stored}"))
        for n in stored:
            records.put(VERSIONS[n])
        assert records.all() == [VERSIONS[winner]]
        assert len(records.stores[0].keys()) == len(stored)  # all versions stay stored


def test_syncs_in_any_order_converge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging is commutative and idempotent. AT_ONCE forces several requests."""
    monkeypatch.setattr(exchange, "AT_ONCE", 2)
    dice, ends = random.Random(0), []
    for attempt in range(4):
        stores = [open_store(f"dir:{tmp_path}/{attempt}/{n}") for n in range(3)]
        for n, one in enumerate(VERSIONS):
            Records(stores[n % 3]).put(one)
        pairs = list(itertools.permutations(stores, 2))
        # The second round copies what arrived after the first.
        for source, target in dice.sample(2 * pairs, 2 * len(pairs)) + pairs:
            list(exchange.copy_records(exchange.contents(source), Records(target), target))
        ends += [dict(exchange.contents(store)) for store in stores]
    assert len(ends[0]) == len(VERSIONS)
    assert all(end == ends[0] for end in ends)


def test_several_stores_act_as_one(tmp_path: Path) -> None:
    """Writes go to the first writable store, reads use all; unreachable stores are reported."""
    away, first, second = map(
        open_store, ["redis://127.0.0.1:1", f"disk:{tmp_path}/a", f"dir:{tmp_path}/b"]
    )
    write_pack(tmp_path / "p", [])
    pack = open_store(f"pack:{tmp_path}/p")
    with pytest.raises(StoreError, match="a pack is read-only"):
        Records(pack).put(VERSIONS[0])
    several = Records([away, pack, first, second])
    assert several.put(VERSIONS[0]) is first
    assert "127.0.0.1:1" in several.unreachable[0]
    Records(second).put(VERSIONS[1])
    assert several.all() == [VERSIONS[1]] == [several.one(VERSIONS[0].id[:5]).record]
    assert "127.0.0.1:1" in several.unreachable[0]
    assert len(several.remove(several.versions(VERSIONS[1].key.id, VERSIONS[1].batch))) == 2
    assert several.all() == []
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        Records(away).all()


def test_copy_outcomes(tmp_path: Path) -> None:
    source, target, lone = (open_store(f"dir:{tmp_path}/{n}") for n in "stl")
    other, revised = record(key=INFER), replace(VERSIONS[2], revised=1.74e9)
    torn, planted = record(created=1.67e9), record(created=1.66e9)
    added, known = (VERSIONS[1], other, revised, torn), VERSIONS[0]
    for store, several in ((target, (known, VERSIONS[2])), (source, (known, *added))):
        for one in several:
            Records(store).put(one)
    target.put(name_of(torn).text, b"torn")
    for store in (source, lone):
        store.put(name_of(planted).text, b"rubbish")
    assert Records(lone).health(lone) == "ok: 0 records, 1 unreadable"

    def copy_all() -> dict[str, str]:
        rows = exchange.copy_records(exchange.contents(source), Records(target), target)
        return {row.name: row.outcome for row in rows}

    outcomes = {name_of(known).text: "known", name_of(planted).text: "refused"}
    assert copy_all() == {**outcomes, **{name_of(one).text: "added" for one in added}}
    assert {*copy_all().values()} == {"known", "refused"}


def test_a_pack_can_be_exported_imported_and_read_as_a_store(tmp_path: Path) -> None:
    records = Records(open_store(f"disk:{tmp_path}/s"))
    for one in (*VERSIONS, record(key=INFER)):
        records.put(one)
    path = tmp_path / "records.pack"
    assert exchange.export(records, path) == 2
    pack = PackStore(path)
    assert pack.health() == "ok, read-only"
    assert {one.id for one in Records(pack).all()} == {one.id for one in records.all()}
    other = open_store(f"dir:{tmp_path}/o")
    assert {row.outcome for row in exchange.unpack(path, Records(other))[1]} == {"added"}
    assert sorted(other.keys()) == sorted(pack.keys())
    assert pack.get("record/nothing") is None
    whole = path.read_bytes()
    foreign = b"PK\x03\x04 not one of ours" * 100
    for bad in (whole[: len(whole) // 2], whole[:1], b"", foreign):
        path.write_bytes(bad)
        with pytest.raises(StoreDamaged):
            list(exchange.unpack(path, Records(other))[1])
        assert "damaged" in PackStore(path).health()


def test_a_full_disk_error_names_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (records := Records(open_store(f"disk:{tmp_path}/s"))).put(VERSIONS[0])
    path = tmp_path / "records.pack"

    def put_all(store: DiskStore, _parts: object) -> None:
        full = OSError("database or disk is full")
        raise StoreError(f"cache {store.path}: {full}; point elsewhere") from full

    def fsync(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskStore, "put_all", put_all)
    with pytest.raises(StoreError) as refused:
        exchange.export(records, path)
    assert str(refused.value) == f"pack {path}: database or disk is full"
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=str(path)):
        write_whole(path, b"a page")
    assert not list(tmp_path.glob(".writing-*"))


def test_required_signatures_hide_unsigned_records(tmp_path: Path) -> None:
    keyring = KeyRing(b"a secret of a team", required=True)
    store, other = (open_store(f"dir:{tmp_path}/{n}") for n in "so")
    Records(store).put(VERSIONS[1])
    strict = Records(store, keyring=keyring)
    assert strict.all() == [] and "not signed" in strict.damaged[0]
    strict.put(VERSIONS[0])
    assert strict.all() == [VERSIONS[0]]
    path = tmp_path / "signed.pack"
    exchange.export(strict, path)
    foreign = KeyRing(b"the secret of another", required=True)
    for keys, outcome, why in ((keyring, "added", ""), (foreign, "refused", "another secret")):
        (row,) = exchange.unpack(path, Records(other, keyring=keys))[1]
        assert row.outcome == outcome and why in row.reason


def test_bad_secrets_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADVISOR_SIGNED_ONLY", "1")
    for secret, says in (("", "no secret"), ("short", "at least 16")):
        monkeypatch.setenv("ADVISOR_SECRET", secret)
        with pytest.raises(UsageError, match=says):
            KeyRing.from_environment()
    file = tmp_path / "secret"
    file.write_text("what openssl printed\n")
    file.chmod(0o600)
    monkeypatch.setenv("ADVISOR_SECRET_FILE", str(file))
    found = KeyRing.from_environment()
    assert (found.secret, found.required) == (b"what openssl printed", True)
    assert "openssl" not in repr(found)


def test_each_batch_size_has_its_own_record(store: ByteStore) -> None:
    """The key does not contain the batch size."""
    records = Records(store)
    small = record(created=1.73e9, effort="quick", key=SMALL)
    records.put(VERSIONS[2])
    records.put(small)
    assert len(records.all()) == 2
    for batch, wanted in ((64, VERSIONS[2]), (8, small), (None, small)):
        given = {} if batch is None else {"shapes": ((batch, 3, 256, 256),)}
        query = Query(environment=ENVIRONMENT, given=given)
        assert best(query, records.all()).record == wanted


def test_commands_and_targets_with_one_key_keep_their_own_records(store: ByteStore) -> None:
    """Every name of a target shows its best version. A record of a target is never shown for a
    run, nor one command's record for another command."""
    records = Records(store)
    long = record(created=1.72e9, effort="exhaustive")
    alias = replace(long, target=replace(long.target, name="other.py:Net"), revised=1.74e9)
    runs = []
    for number, words in enumerate((("python", "a.py"), ("python", "b.py"))):
        key = replace(KEY, task=replace(KEY.task, target=" ".join(words), command=words))
        runs.append(record(key, " ".join(words), 1.65e9 + number, trials=1 + number))
    for one in (record(created=1.6e9), long, alias, *runs):
        records.put(one)
    held = {one.record.target.name: one.record for one in records.held()}
    assert [held[one.target.name] for one in runs] == runs
    assert held["model.py:Net"].provenance == held["other.py:Net"].provenance == long.provenance
    query = Query(environment=ENVIRONMENT, given={"command": ("python", "c.py")})
    assert best(query, held.values()).record == runs[1]
    of_target = best(Query(environment=ENVIRONMENT), held.values()).record
    assert of_target is not None and not of_target.key.task.command


def test_a_writer_removes_old_temporary_files(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".writing-1-a", tmp_path / ".writing-2-b"
    for path in (old, fresh):
        path.touch()
    os.utime(old, (0, 0))
    store = open_store(f"dir:{tmp_path}")
    assert store.keys() == [] and old.exists()
    store.put("a", b"1")
    assert fresh.exists() and not old.exists() and store.keys() == ["a"]


def test_folders_are_private_and_keys_cannot_escape_them(tmp_path: Path) -> None:
    store = open_store(f"dir:{tmp_path}/new/deep")
    for key in ("../out", "a/../../out", "/etc/x", ".hidden", ""):
        with pytest.raises(RecordDamaged):
            store.put(key, b"1")
    Records(store).put(VERSIONS[0])
    for folder in ("new", "new/deep"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700
    assert len(list((tmp_path / "new" / "deep").iterdir())) == 1


def test_identical_winners_are_shown_once() -> None:
    one = record()
    same = replace(one, winners=tuple(replace(w, choice=one.winner("loop")) for w in one.winners))
    assert list(one.choices) == list(same.choices) == ["torch default", "at your batch"]
