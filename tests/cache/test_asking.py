"""How stores are asked for a training script: in order, in time, on every rank alike."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cache.asking import MAX_REFUSED, Chosen, LookupResult, ask
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter, StoredRecord
from advisor.cache.records import Records
from advisor.cache.stores import Remote, Store, open_store
from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.timeout import check_deadline, run_with_timeout, time_left
from advisor.errors import RecordDamaged, StoreError
from tests.cache.examples import KEY, changed, record

ROOT = Path(__file__).parents[2]
STALE = replace(record(), stale="slower now")


def first(held: Sequence[StoredRecord]) -> Chosen:
    """The newest of all, with which one goes on where it is stale."""
    best = max(held, key=lambda one: one.record.provenance.created, default=None)
    return Chosen(held=best, final=best is not None and not best.record.stale)


def asked(
    records: Records,
    choose: Callable[[Sequence[StoredRecord]], Chosen] = first,
    **more: float,
) -> LookupResult:
    return ask(records, RecordFilter(target="model.py:Net"), choose, **more)


def served(said: LookupResult) -> StoredRecord | None:
    return said.chosen.held if said.chosen else None


@pytest.fixture
def stores(tmp_path: Path) -> list[Store]:
    return [open_store(f"dir:{tmp_path}/{name}") for name in "abc"]


class Slow(DirStore):
    """A folder that hangs in a call that nothing interrupts, as on a network that is away."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.release = threading.Event()

    def keys(self) -> list[str]:
        self.release.wait(60)
        return super().keys()


class Endless(DirStore):
    """A folder of records that are each read for a while."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads = 0

    def get_many(self, keys: Iterable[str]) -> Mapping[str, bytes | RecordDamaged]:
        while True:
            self.reads += 1
            time.sleep(0.01)
            check_deadline()


def test_the_first_that_has_it_is_the_last_asked(stores: list[Store]) -> None:
    Records(stores[1]).put(record())
    Records(stores[2]).put(record(created=1.72e9))
    said = asked(Records(stores))
    one = served(said)
    assert one is not None and one.record == record()
    assert [url for url, _said in said.stores] == [store.url for store in stores[:2]]
    assert said.stores[0][1].startswith("nothing of it (")
    assert said.stores[1][1].startswith("1 record of it (")


def test_what_is_stale_does_not_end_the_search(stores: list[Store]) -> None:
    Records(stores[0]).put(STALE)
    Records(stores[1]).put(record(created=1.72e9))
    said = asked(Records(stores))
    one = served(said)
    assert one is not None and one.store is stores[1]


@pytest.mark.parametrize(("rank", "copied"), [(None, True), ("0", True), ("1", False)])
def test_one_rank_writes_back(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch, rank: str | None, copied: bool
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    Records(stores[2]).put(record())
    said = asked(Records(stores))
    one = served(said)
    assert one is not None and one.record == record()
    for store in stores[:2]:
        assert bool(store.keys()) == copied


def test_every_rank_sees_the_same(stores: list[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    Records(stores[0]).put(STALE)
    Records(stores[1]).put(record(created=1.72e9))
    Records(stores[2]).put(record(created=1.73e9))
    seen = []
    for rank in ("1", "0", "7"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "8")
        said = asked(Records(stores))
        one = served(said)
        assert one is not None
        seen.append((one.record, len(said.stores)))
    assert seen[0] == seen[1]


def test_one_deadline_for_all(tmp_path: Path) -> None:
    hanging = [Slow(tmp_path / str(number)) for number in range(20)]
    after = open_store(f"dir:{tmp_path}/c")
    Records(after).put(record())
    began = time.monotonic()
    said = asked(Records([*hanging, after]), deadline_s=0.2)
    assert time.monotonic() - began < 20
    assert "no answer within" in said.stores[0][1]
    assert "not asked, the stores before it" in said.stores[-1][1]
    assert len(said.failed) == 21 and said.chosen is None
    said = asked(Records([hanging[0], after]), deadline_s=1.0)
    assert served(said) is not None
    for store in hanging:
        store.release.set()


def test_what_nobody_waits_for_ends(tmp_path: Path) -> None:
    endless = Endless(tmp_path)
    Records(DirStore(tmp_path)).put(record())
    said = asked(Records(endless), deadline_s=0.1)
    assert len(said.failed) == 1
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        reads = endless.reads
        time.sleep(0.1)
        if endless.reads == reads:
            return
    raise AssertionError("it still reads")


def test_time_is_told_to_those_who_ask() -> None:
    assert time_left(5.0) == 5.0
    assert run_with_timeout(10.0, lambda: time_left(60.0), "x") <= 10.0
    with pytest.raises(StoreError, match="no answer"):
        run_with_timeout(0.01, lambda: time.sleep(0.2), "x")


def test_one_that_hangs_leaves_the_others_alone() -> None:
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(60.0, lambda: 1 // 0, "x")
    held, release = [], threading.Event()

    def hang() -> None:
        held.append(threading.current_thread())
        release.wait(60)

    with pytest.raises(StoreError, match="no answer"):
        run_with_timeout(0.01, hang, "x")
    (stuck,) = held
    for _ in range(2):
        assert run_with_timeout(60.0, threading.get_ident, "x") != stuck.ident
    assert time_left(5.0) == 5.0
    assert run_with_timeout(60.0, lambda: time_left(99.0), "x") <= 60.0
    release.set()
    stuck.join(60)
    assert not stuck.is_alive()


def test_no_thread_is_left_for_a_fork() -> None:
    used = run_with_timeout(60.0, threading.current_thread, "x")
    assert not used.is_alive()
    child = os.fork()
    if child == 0:
        os._exit(0 if run_with_timeout(60.0, threading.active_count, "x") == 2 else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_is_late_from_far_is_kept_near(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Far(Slow, Remote):
        patience_s, address = 0.02, None

        def load(self) -> None: ...

    far = Far(Path(stores[2].url.partition(":")[2]))
    Records(stores[2]).put(record())
    said = asked(Records([far, stores[0]]))
    assert served(said) is None
    far.release.set()
    limit = time.monotonic() + 20
    while not stores[0].keys() and time.monotonic() < limit:
        time.sleep(0.02)
    assert Records(stores[0]).all() == [record()]


FORK = """
import os, sys, threading, time, signal
from advisor.cache.asking import Chosen, ask
from advisor.cache.reader import EVERYTHING
from advisor.cache.records import Records
from advisor.cache.stores import open_store
records = Records([open_store(url) for url in sys.argv[1:]])
def look(records=records):
    return ask(records, EVERYTHING, lambda held: Chosen(held=held[0] if held else None))
stop = False
def always():
    while not stop:
        look()
threads = [threading.Thread(target=always, daemon=True) for _ in range(4)]
for thread in threads: thread.start()
time.sleep(0.2)
children = []
for _ in range(40):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        said = look()
        os._exit(0 if said.chosen.held is not None else 3)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
stop = True
for thread in threads: thread.join()
assert look().chosen.held is not None
print(codes.count(0))
"""


def test_forked_children_find_it_too(tmp_path: Path) -> None:
    """While four threads of the parent are reading: whatever lock one holds is not held on."""
    url = f"disk:{tmp_path}/s"
    Records(open_store(url)).put(record())
    done = subprocess.run(
        [sys.executable, "-c", FORK, url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout.strip() == "40", done.stderr[-2000:]


def test_many_threads_of_one_process(tmp_path: Path) -> None:
    store = open_store(f"disk:{tmp_path}/s")
    Records(store).put(record())
    found: list[LookupResult] = []
    threads = [
        threading.Thread(target=lambda: found.append(asked(Records(store), deadline_s=60)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(served(said) is not None for said in found) and len(found) == 16


def test_sync_carries_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from advisor.cache import exchange

    monkeypatch.setattr(exchange, "AT_ONCE", 4)
    source, target = (open_store(f"dir:{tmp_path}/{name}") for name in "st")
    number = 2 * exchange.AT_ONCE + 3
    for threads in range(number):
        Records(source).put(record(key=changed(KEY, "threads", threads), trials=0))
    rows = list(exchange.carry(exchange.contents(source), Records(target), target))
    assert [row.outcome for row in rows] == ["added"] * number
    assert target.keys() == source.keys()
    assert len(Records(target).all()) == number


def test_reading_needs_no_home_and_no_folder(tmp_path: Path) -> None:
    """Whatever of a process's surroundings is missing: a StoreError, or what there is."""
    code = """
import os, sys, torch
from pathlib import Path
gone = Path(sys.argv[1]); gone.mkdir(); os.chdir(gone); gone.rmdir()
from advisor.errors import AdvisorError
from advisor.open_store import open_records
from advisor.cache import settings
said = []
for home in (None, "", "relative", "/proc/nowhere"):
    os.environ.pop("HOME", None)
    if home is not None: os.environ["HOME"] = home
    odd = (None, "", "relative", Path("relative"), Path(sys.argv[2]), 5, 1.5, b"x", object(), [],
           [5], ["~nobody/x"], "disk:~nobody/x", "a\\0b", "dir:" + "x" * 5000, "pack:.",
           {"a": 1}, True,
           "dir:/proc/self/mem", "disk:/dev/null", "\\udc80", "dir:/dev/full", ["", None])
    for cache in odd:
        for patient in (False, True):
            try:
                records = open_records(cache, patient=patient, fallback=True)
                said.append(len(records.all()))
                records.studies
                for store in records.stores: records.health(store)
            except AdvisorError as exc:
                assert "\\n" not in str(exc), exc
                said.append("refused")
    for value in ("1", "", "x", "\\u00b2"):
        for name in ("RANK", "WORLD_SIZE", "ADVISOR_CACHE", "ADVISOR_SECRET_FILE", "XDG_DATA_HOME",
                     "XDG_CACHE_HOME", "ADVISOR_SIGNED_ONLY", "ADVISOR_ON_MISS"):
            os.environ[name] = value
            try:
                open_records(None).all(); settings.on_miss()
            except AdvisorError as exc:
                assert "\\n" not in str(exc), exc
            del os.environ[name]
print(len(said), 1 in said)
"""
    store = tmp_path / "store"
    Records(open_store(f"dir:{store}")).put(record())
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOME", "ADVISOR", "XDG", "USER", "LOGNAME"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "gone"), str(store)],
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["184", "True"], done.stderr[-3000:]


def test_a_user_without_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    from advisor.errors import UsageError
    from advisor.open_store import open_records

    def unknown(_uid: object) -> object:
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "ADVISOR_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="set ADVISOR_CACHE"):
        open_records(None)
    Records(open_store(f"dir:{tmp_path}/s")).put(record())
    assert open_records(f"dir:{tmp_path}/s").all() == [record()]


def test_few_of_many_that_are_refused_are_told(stores: list[Store]) -> None:
    Records(stores[0]).put(record())
    for threads in range(20):
        bad = record(key=changed(KEY, "threads", threads + 1))
        stores[0].put(Name.of(bad, b"rubbish").text, b"rubbish")
    said = asked(Records(stores[0]))
    assert served(said) is not None
    assert len(said.refused) == MAX_REFUSED + 1
    assert said.refused[-1] == f"{stores[0].url}: {20 - MAX_REFUSED} more that cannot be used"
    (name,) = (n for n in Records(stores[0]).names(stores[0]) if n.id == record().key.id)
    stores[1].put(name.text, b"rubbish")
    assert len(asked(Records(stores[1])).refused) == 1


def test_a_record_by_its_origin_or_model_alone(stores: list[Store]) -> None:
    one, other = record(), record(key=changed(KEY, "model", "cd" * 32), name="other.py:Net")
    other = replace(other, target=replace(other.target, origin="fedcba98"))
    for each in (one, other):
        Records(stores[0]).put(each)
    read: list[str] = []

    class Told(DirStore):
        def get_many(self, keys: Iterable[str]) -> Mapping[str, bytes | RecordDamaged]:
            read.extend(keys)
            return super().get_many(read)

    store = Told(Path(stores[0].url.partition(":")[2]))
    records = Records(store)
    for sought, found in (
        (RecordFilter(origins=frozenset(["fedcba98", "0a"])), other),
        (RecordFilter(model="cd" * 32), other),
        (RecordFilter(target="model.py:Net"), one),
        (RecordFilter(id=one.key.id, batch=64), one),
    ):
        read.clear()
        (held,) = records.look_into(store, sought).held
        assert held.record == found
        assert len(read) == 1  # only of the names that say so
    newer = replace(record(key=other.key, name="third.py:Net", created=1.72e9), family="f0")
    newer = replace(newer, key=changed(newer.key, "model", "ef" * 32))
    Records(stores[0]).put(newer)
    for most, found, more in ((1, {one, newer}, 1), (2, {one, newer}, 0)):
        read.clear()
        listing = records.look_into(store, RecordFilter(similar_to=one.key, family="f0", most=most))
        assert {held.record for held in listing.held} == found and len(listing.left) == more
        assert len(read) == most + 1  # its own model's, and of others the newest
    assert records.look_into(store, RecordFilter(origins=frozenset())).held == ()
    assert records.look_into(store, RecordFilter(id=one.key.id, batch=8)).held == ()
