"""Versions of a record, several stores, what is refused, and records carried about."""

from __future__ import annotations

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
from advisor.cache.stores import Store, open_store
from advisor.cache.stores.pack import PackStore, write
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


def name(one: Record) -> Name:
    return Name.of(one, encode(one))


def test_a_name_is_read_back() -> None:
    for one in VERSIONS:
        assert Name.parse(name(one).text) == name(one)
    for text in ("", "record/a/b/c", name(VERSIONS[0]).text + "0", "study/x"):
        assert Name.parse(text) is None


@pytest.mark.parametrize(
    ("there", "counts"),
    [
        ([0, 1], 1),  # the newer
        ([0, 1, 2], 2),  # more effort, though older
        ([1, 3], 1),  # less effort, though newer
        ([2, 4, 0], 0),  # marked stale: another measurement counts
        ([4, 2], 4),  # what verify said of a measurement counts over the measurement
        ([0, 5], 5),
        ([6, 3], 3),
    ],
)
def test_which_of_two_counts(tmp_path: Path, there: list[int], counts: int) -> None:
    for order in itertools.permutations(there):
        assert ranked(name(VERSIONS[n]) for n in order)[0] == name(VERSIONS[counts])
    records = Records(open_store(f"dir:{tmp_path}"))
    for n in there:
        records.put(VERSIONS[n])
    assert records.all() == [VERSIONS[counts]]
    assert len(records.stores[0].keys()) == len(there)  # nothing is lost


def test_stores_may_be_synced_in_any_order(tmp_path: Path) -> None:
    """Merging commutes, and once is as good as twice."""
    dice, ends = random.Random(0), []
    for attempt in range(4):
        stores = [open_store(f"dir:{tmp_path}/{attempt}/{n}") for n in range(3)]
        for n, one in enumerate(VERSIONS):
            Records(stores[n % 3]).put(one)
        pairs = list(itertools.permutations(stores, 2))
        # A first round may miss what comes later.
        for source, target in dice.sample(2 * pairs, 2 * len(pairs)) + pairs:
            list(exchange.carry(exchange.contents(source), Records(target), target))
        ends += [dict(exchange.contents(store)) for store in stores]
    assert len(ends[0]) == len(VERSIONS)
    assert all(end == ends[0] for end in ends)


class TestSeveral:
    @pytest.fixture
    def stores(self, tmp_path: Path) -> list[Store]:
        return [open_store(f"disk:{tmp_path}/a"), open_store(f"dir:{tmp_path}/b")]

    def test_the_first_that_can_be_written_keeps(self, stores: list[Store], tmp_path: Path) -> None:
        write(tmp_path / "p", [])
        pack = open_store(f"pack:{tmp_path}/p")
        assert Records([pack, *stores]).put(VERSIONS[0]) is stores[0]
        assert Records([pack, *stores]).all() == [VERSIONS[0]]
        with pytest.raises(StoreError, match="a pack is read-only"):
            Records(pack).put(VERSIONS[0])

    def test_the_union_is_what_there_is(self, stores: list[Store]) -> None:
        Records(stores[0]).put(VERSIONS[0])
        Records(stores[1]).put(VERSIONS[1])
        both = Records(stores)
        assert both.all() == [VERSIONS[1]]
        assert both.get(VERSIONS[0].id[:5]) == VERSIONS[1]
        assert both.remove(both.versions(VERSIONS[1])) == 2
        assert both.all() == []

    def test_one_that_is_away_is_told(self, stores: list[Store]) -> None:
        away = open_store("redis://127.0.0.1:1")
        records = Records([away, stores[0]])
        assert records.put(VERSIONS[0]) is stores[0]
        assert "127.0.0.1:1" in records.unreachable[0]
        assert records.all() == [VERSIONS[0]]
        assert "127.0.0.1:1" in records.unreachable[0]
        with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
            Records(away).all()


def test_what_carrying_says(tmp_path: Path) -> None:
    source, target = (open_store(f"dir:{tmp_path}/{n}") for n in "st")
    Records(target).put(VERSIONS[0])
    Records(target).put(VERSIONS[2])
    other = record(key=INFER)
    for one in (VERSIONS[0], VERSIONS[1], other):
        Records(source).put(one)
    Records(source).put(replace(VERSIONS[2], revised=1.74e9))
    planted = record(created=1.66e9)
    source.put(name(planted).text, b"rubbish")
    rows = list(exchange.carry(exchange.contents(source), Records(target), target))
    assert {row.name: row.outcome for row in rows} == {
        name(VERSIONS[0]).text: "known",
        name(VERSIONS[1]).text: "older",
        name(other).text: "added",
        name(replace(VERSIONS[2], revised=1.74e9)).text: "updated",
        name(planted).text: "refused",
    }
    again = exchange.carry(exchange.contents(source), Records(target), target)
    assert {row.outcome for row in again} == {"known", "refused"}


def test_a_pack_carries_and_is_a_store(tmp_path: Path) -> None:
    store = open_store(f"disk:{tmp_path}/s")
    records = Records(store)
    for one in (*VERSIONS, record(key=INFER)):
        records.put(one)
    path = tmp_path / "records.pack"
    assert exchange.export(records, path) == 2
    pack = PackStore(path)
    assert pack.health() == "ok, read-only"
    assert sorted(r.id for r in Records(pack).all()) == sorted(r.id for r in records.all())
    other = open_store(f"dir:{tmp_path}/o")
    assert {row.outcome for row in exchange.unpack(path, Records(other))[1]} == {"added"}
    assert sorted(other.keys()) == sorted(pack.keys())
    assert pack.get("record/nothing") is None
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 1, 0):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreDamaged):
            list(exchange.unpack(path, Records(other))[1])
    assert "damaged" in PackStore(path).health()
    path.write_bytes(b"PK\x03\x04 not one of ours, and long enough to have an end")
    with pytest.raises(StoreDamaged, match=r"no pack|damaged"):
        Records(PackStore(path)).all()


def test_only_signed_records_where_that_is_asked(tmp_path: Path) -> None:
    keyring = KeyRing(b"a secret of a team", required=True)
    store = open_store(f"dir:{tmp_path}/s")
    Records(store).put(VERSIONS[1])
    unsigned = Records(store, keyring=keyring)
    assert unsigned.all() == []
    strict = Records(store, keyring=keyring)
    assert "not signed" in unsigned.damaged[0]
    strict.put(VERSIONS[0])
    assert strict.all() == [VERSIONS[0]]
    path = tmp_path / "signed.pack"
    exchange.export(strict, path)
    other = open_store(f"dir:{tmp_path}/o")
    rows = list(exchange.unpack(path, Records(other, keyring=keyring))[1])
    assert [row.outcome for row in rows] == ["added"]
    foreign = KeyRing(b"the secret of another", required=True)
    rows = list(exchange.unpack(path, Records(other, keyring=foreign))[1])
    assert [row.outcome for row in rows] == ["refused"]
    assert "another secret" in rows[0].reason


def test_the_secret_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADVISOR_SIGNED_ONLY", "1")
    for secret, says in (("", "no secret"), ("short", "at least 16")):
        monkeypatch.setenv("ADVISOR_SECRET", secret)
        with pytest.raises(UsageError, match=says):
            KeyRing.from_environment()
    (tmp_path / "secret").write_text("what openssl printed\n")
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv("ADVISOR_SECRET_FILE", str(tmp_path / "secret"))
    found = KeyRing.from_environment()
    assert (found.secret, found.required) == (b"what openssl printed", True)
    assert "openssl" not in repr(found)


def test_batches_are_records_of_their_own(tmp_path: Path) -> None:
    """The key does not hold the batch; less effort at one does not hide behind more at another."""
    records = Records(open_store(f"dir:{tmp_path}"))
    small = record(created=1.73e9, effort="quick", key=SMALL)
    records.put(VERSIONS[2])
    records.put(small)
    assert len(records.all()) == 2
    for batch, wanted in ((64, VERSIONS[2]), (8, small), (None, small)):
        given = {} if batch is None else {"shapes": ((batch, 3, 256, 256),)}
        query = Query(environment=ENVIRONMENT, given=given)
        assert best(query, records.all()).record == wanted


def test_what_commands_measured_under_one_key_is_told_as_theirs(tmp_path: Path) -> None:
    """Of a target's names each is given the version that counts; what a target measured is never
    told as a run's, nor what one command gave as another's."""
    records = Records(open_store(f"dir:{tmp_path}"))
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


def test_what_is_damaged_is_repaired_by_a_good_copy(tmp_path: Path) -> None:
    good, bad = (open_store(f"dir:{tmp_path}/{n}") for n in "gb")
    for store in (good, bad):
        Records(store).put(VERSIONS[0])
    bad.put(name(VERSIONS[0]).text, b"torn")
    assert "1 unreadable" in Records(bad).health(bad)
    (row,) = exchange.carry(exchange.contents(good), Records(bad), bad)
    assert row.outcome == "updated"
    assert Records(bad).all() == [VERSIONS[0]]


def test_a_pack_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a regular file"):
        open_store(f"pack:{tmp_path}/pipe").keys()


def test_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    Records(open_store(f"dir:{tmp_path}/new/deep")).put(VERSIONS[0])
    for folder in ("new", "new/deep"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


def test_a_killed_writer_s_leavings_are_tidied(tmp_path: Path) -> None:
    store = open_store(f"dir:{tmp_path}")
    store.put("a", b"1")
    old, fresh = tmp_path / ".writing-1-a", tmp_path / ".writing-2-b"
    for path in (old, fresh):
        path.touch()
    os.utime(old, (0, 0))
    assert store.keys() == ["a"]
    assert [path.name for path in store.leftovers()] == [old.name]
    assert fresh.exists()


def test_a_key_cannot_leave_the_folder(tmp_path: Path) -> None:
    store = open_store(f"dir:{tmp_path}/in")
    for key in ("../out", "a/../../out", "/etc/x", ".hidden", ""):
        with pytest.raises(RecordDamaged):
            store.put(key, b"1")
    assert not (tmp_path / "in").exists() or list((tmp_path / "in").iterdir()) == []


def test_a_config_that_won_twice_is_called_what_most_scripts_are() -> None:
    one = record()
    same = replace(one, winners=tuple(replace(w, choice=one.winner("loop")) for w in one.winners))
    for each in (one, same):
        assert list(each.choices) == ["torch default", "at your batch"]
