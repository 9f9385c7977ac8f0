"""How stores are asked for a training script: in order, in time, on every rank alike; and what an
explanation says of it."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cache.asking import MAX_LISTED, MAX_REFUSED, Explanation, NearMiss, ask
from advisor.cache.config import Config
from advisor.cache.match import Difference, Match, Query
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter, StoredRecord
from advisor.cache.records import Records
from advisor.cache.shown import interval, size, speedup
from advisor.cache.stores import ByteStore, Remote, open_store
from advisor.cache.stores.dir import DirStore
from advisor.cache.stores.timeout import check_deadline
from advisor.errors import RecordDamaged
from tests.cache.examples import ENVIRONMENT, KEY, changed, record
from tests.forks import until


def first(held: Sequence[StoredRecord]) -> Match:
    """The newest of all, with which one goes on where it is stale."""
    best = max(held, key=lambda one: one.record.provenance.created, default=None)
    return Match(held=best, final=best is not None and not best.record.stale)


def asked(records: Records, **more: float) -> tuple[StoredRecord | None, Explanation]:
    """The record that is served, and what the stores said."""
    said = Explanation(target="", query=Query(environment=ENVIRONMENT))
    match, _held = ask(records, RecordFilter(target="model.py:Net"), first, said, **more)
    return match and match.held, said


Found = dict[str, bytes | RecordDamaged]


@pytest.fixture
def stores(tmp_path: Path) -> list[ByteStore]:
    return [open_store(f"dir:{tmp_path}/{name}") for name in "abc"]


class Slow(DirStore):
    """A folder that hangs in a call that nothing interrupts, as on a network that is away."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.release = threading.Event()

    def keys(self) -> list[str]:
        self.release.wait(60)
        return super().keys()


def test_the_first_that_has_it_is_the_last_asked(stores: list[ByteStore]) -> None:
    Records(stores[0]).put(replace(record(), stale="slower now"))  # which does not end the search
    Records(stores[1]).put(record(created=1.72e9))
    Records(stores[2]).put(record(created=1.73e9))
    one, said = asked(Records(stores))
    assert one is not None and one.store is stores[1] and one.record == record(created=1.72e9)
    assert [url for url, _said in said.stores] == [store.url for store in stores[:2]]
    assert all(line.startswith("1 record found (") for _url, line in said.stores)
    one, said = asked(Records(open_store(f"{stores[0].url}/none")))
    ((_url, line),) = said.stores
    assert one is None and line.startswith("no record found (")


@pytest.mark.parametrize("rank", ["", "0", "1"])
def test_every_rank_sees_the_same_and_one_writes_back(
    stores: list[ByteStore], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    if rank:
        monkeypatch.setenv("RANK", rank)
    Records(stores[2]).put(record())
    one, _said = asked(Records(stores))
    assert one is not None and one.record == record()
    assert [bool(store.keys()) for store in stores[:2]] == [rank != "1"] * 2


def test_one_deadline_for_all(tmp_path: Path) -> None:
    hanging = [Slow(tmp_path / str(number)) for number in range(20)]
    after = open_store(f"dir:{tmp_path}/c")
    Records(after).put(record())
    began = time.monotonic()
    one, said = asked(Records([*hanging, after]), deadline_s=0.2)
    assert time.monotonic() - began < 20
    assert "no answer within" in said.stores[0][1]
    assert "not asked, the stores before it" in said.stores[-1][1]
    assert len(said.failed) == 21 and one is None
    assert asked(Records([hanging[0], after]), deadline_s=1.0)[0] is not None
    for store in hanging:
        store.release.set()


def test_what_nobody_waits_for_ends(tmp_path: Path) -> None:
    ended = threading.Event()

    class Endless(DirStore):
        def get_many(self, keys: Iterable[str], most: int = 0) -> Found:
            try:
                while True:
                    time.sleep(0.01)
                    check_deadline()
            finally:
                ended.set()

    Records(DirStore(tmp_path)).put(record())
    assert len(asked(Records(Endless(tmp_path)), deadline_s=0.1)[1].failed) == 1
    assert ended.wait(20)


def test_what_is_late_from_far_is_kept_near(stores: list[ByteStore]) -> None:
    class Far(Slow, Remote):
        timeout_s = 0.02

        def load(self) -> None: ...

    far = Far(Path(stores[2].url.partition(":")[2]))
    Records(stores[2]).put(record())
    assert asked(Records([far, stores[0]]))[0] is None
    far.release.set()
    until(stores[0].keys)
    assert Records(stores[0]).all() == [record()]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_children_find_it_too(tmp_path: Path) -> None:
    """While four threads of the parent are reading: whatever lock one holds is not held on."""
    records, stop = Records(open_store(f"disk:{tmp_path}/s")), threading.Event()
    records.put(record())

    def always() -> None:
        while not stop.is_set():
            asked(records)

    def forked() -> int:
        if child := os.fork():
            return child
        found = None
        try:
            signal.alarm(60)
            found, _said = asked(records)
        finally:
            os._exit(0 if found is not None else 3)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(always)
        try:
            children = [forked() for _ in range(40)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        finally:
            stop.set()
    assert codes == [0] * 40 and asked(records)[0] is not None


def test_few_of_many_that_are_refused_are_told(stores: list[ByteStore]) -> None:
    Records(stores[0]).put(record())
    for threads in range(20):
        bad = record(key=changed(KEY, "threads", threads + 1))
        stores[0].put(Name.of(bad, b"rubbish").text, b"rubbish")
    one, said = asked(Records(stores[0]))
    assert one is not None
    assert len(said.refused) == MAX_REFUSED + 1
    assert said.refused[-1] == f"{stores[0].url}: {20 - MAX_REFUSED} more that cannot be used"


def test_only_what_is_looked_for_is_read(tmp_path: Path) -> None:
    read: list[str] = []

    class Told(DirStore):
        def get_many(self, keys: Iterable[str], most: int = 2**20) -> Found:
            read.extend(keys)
            return super().get_many(read)

    one, other, newer = (
        replace(record(key=changed(KEY, "model", model), name=name, created=created), family=family)
        for model, name, created, family in (
            (KEY.model, "model.py:Net", 1.7e9, ""),
            ("cd" * 32, "other.py:Net", 1.7e9, ""),
            ("ef" * 32, "third.py:Net", 1.72e9, "f0"),
        )
    )
    store = Told(tmp_path)
    records = Records(store)
    for each in (one, other):
        records.put(each)
    for sought, found in (
        (RecordFilter(model="cd" * 32), [other]),
        (RecordFilter(target="model.py:Net"), [one]),
        (RecordFilter(id=one.key.id, batch=64), [one]),
        (RecordFilter(id=one.key.id, batch=8), []),
    ):
        read.clear()
        assert [held.record for held in records.look_into(store, sought).held] == found
        assert len(read) == len(found)
    assert RecordFilter(id=one.key.id, batch=64).question() == {"id": one.key.id, "batch": 64}
    records.put(newer)
    for most, more in ((1, 1), (2, 0)):
        read.clear()
        listing = records.look_into(store, RecordFilter(similar_to=one.key, family="f0", most=most))
        assert {held.record for held in listing.held} == {one, newer} and len(listing.left) == more
        assert len(read) == most + 1  # its own model's, and of others the newest


def near(number: int, *differs: Difference, signed: bool = True) -> NearMiss:
    where = {"target": "model.py:Net", "store": "dir:/a"}
    return NearMiss(id=f"{number}", signed=signed, differs=differs, **where)


def test_a_miss() -> None:
    edited = Difference(field="code", wanted="edited since", found="as tuned")
    strict = Difference(field="deterministic", wanted=False, found=True)
    given = {"shapes": ((8, 3, 256, 256),), "mode": "train", "deterministic": False}
    given |= {"model_args": Config(a=1, b="x")}
    said = Explanation(
        target="model.py:Net",
        query=Query(environment=ENVIRONMENT, given=given, model=KEY.model),
        reason="nothing there",
        stores=[("dir:/a", "1 record"), ("redis://b", "did not answer")],
        refused=["1 is damaged", "2 is not signed"],
        near_misses=(near(16, signed=False), *[near(32, edited, strict)] * (MAX_LISTED + 1)),
    )
    *lines, more = str(said).splitlines()
    assert more.strip() == "and 2 more; see: advisor show"
    assert lines[: 2 - MAX_LISTED] == [
        "looked for  model.py:Net",
        "  model         abababababab",
        "  shape         8x3x256x256",
        "  mode          train",
        "  model_args    a=1 b=x",
        "  deterministic False",
        "  device        NVIDIA H200",
        "  driver        580.1",
        "  CUDA          13.0",
        "  cuDNN         91900",
        "  torch         2.11.0",
        "looked in   dir:/a: 1 record",
        "            redis://b: did not answer",
        "miss        nothing there",
        "refused     1 is damaged",
        "refused     2 is not signed",
        "not served  16 model.py:Net (unsigned): it fits, but cannot serve this (see above), or "
        "another was preferred",
        "not served  32 model.py:Net: code as tuned -> edited since, deterministic True -> False",
    ]


def test_a_size_has_the_unit_that_fits() -> None:
    texts = {0: "-", 512: "512 B", 1000 * 1024: "1000 KiB", 2**20: "1 MiB", 3 * 2**29: "1.5 GiB"}
    assert {count: size(count) for count in texts} == texts
    assert size(5000 * 2**40) == "5000 TiB"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.36, 1.41, "1.36-1.41"),
        (1.78, 15.27, "1.78-15.27"),
        (0.2, 0.9, "0.20-0.90"),
        (0.0, math.inf, "could not tell"),
        (0.6, 1.8, "could not tell"),
    ],
)
def test_figures_that_say_nothing_are_not_shown(low: float, high: float, text: str) -> None:
    assert interval(low, high) == text
    assert speedup(1.9, low, high) == (text if text == "could not tell" else f"1.90x ({text})")
