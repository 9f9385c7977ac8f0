"""Lookups for a training script: store order, deadline, ranks; and the text of explanations."""

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


def newest(records: Sequence[StoredRecord]) -> Match:
    """Chooses the newest record; the search ends there unless it is stale."""
    best = max(records, key=lambda one: one.record.provenance.created, default=None)
    return Match(held=best, final=best is not None and not best.record.stale)


def lookup(records: Records, **more: float) -> tuple[StoredRecord | None, Explanation]:
    """Returns the chosen record and the explanation."""
    explanation = Explanation(target="", query=Query(environment=ENVIRONMENT))
    match, _held = ask(records, RecordFilter(target="model.py:Net"), newest, explanation, **more)
    return match and match.held, explanation


Fetched = dict[str, bytes | RecordDamaged]


@pytest.fixture
def stores(tmp_path: Path) -> list[ByteStore]:
    return [open_store(f"dir:{tmp_path}/{name}") for name in "abc"]


class HangingStore(DirStore):
    """A folder whose `keys` blocks until released, as on an unreachable network."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.release = threading.Event()

    def keys(self) -> list[str]:
        self.release.wait(60)
        return super().keys()


def test_the_search_ends_at_the_first_usable_record(stores: list[ByteStore]) -> None:
    Records(stores[0]).put(replace(record(), stale="slower now"))  # stale: the search goes on
    Records(stores[1]).put(record(created=1.72e9))
    Records(stores[2]).put(record(created=1.73e9))
    one, explanation = lookup(Records(stores))
    assert one is not None and one.store is stores[1] and one.record == record(created=1.72e9)
    assert [url for url, _said in explanation.stores] == [store.url for store in stores[:2]]
    assert all(line.startswith("1 record found (") for _url, line in explanation.stores)
    one, explanation = lookup(Records(open_store(f"{stores[0].url}/none")))
    ((_url, line),) = explanation.stores
    assert one is None and line.startswith("no record found (")


@pytest.mark.parametrize("rank", ["", "0", "1"])
def test_all_ranks_find_the_record_and_only_rank_0_copies_it(
    stores: list[ByteStore], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    if rank:
        monkeypatch.setenv("RANK", rank)
    Records(stores[2]).put(record())
    one, _said = lookup(Records(stores))
    assert one is not None and one.record == record()
    assert [bool(store.keys()) for store in stores[:2]] == [rank != "1"] * 2


def test_all_stores_share_one_deadline(tmp_path: Path) -> None:
    hanging = [HangingStore(tmp_path / str(number)) for number in range(20)]
    after = open_store(f"dir:{tmp_path}/c")
    Records(after).put(record())
    began = time.monotonic()
    one, explanation = lookup(Records([*hanging, after]), deadline_s=0.2)
    assert time.monotonic() - began < 20
    assert "no answer within" in explanation.stores[0][1]
    assert "not asked, the stores before it" in explanation.stores[-1][1]
    assert len(explanation.failed) == 21 and one is None
    assert lookup(Records([hanging[0], after]), deadline_s=1.0)[0] is not None
    for store in hanging:
        store.release.set()


def test_an_abandoned_request_is_cancelled(tmp_path: Path) -> None:
    ended = threading.Event()

    class Endless(DirStore):
        def get_many(self, keys: Iterable[str], most: int = 0) -> Fetched:
            try:
                while True:
                    time.sleep(0.01)
                    check_deadline()
            finally:
                ended.set()

    Records(DirStore(tmp_path)).put(record())
    assert len(lookup(Records(Endless(tmp_path)), deadline_s=0.1)[1].failed) == 1
    assert ended.wait(20)


def test_a_late_remote_answer_is_copied_to_the_local_store(stores: list[ByteStore]) -> None:
    class Far(HangingStore, Remote):
        timeout_s = 0.02

        def load(self) -> None: ...

    far = Far(Path(stores[2].url.partition(":")[2]))
    Records(stores[2]).put(record())
    assert lookup(Records([far, stores[0]]))[0] is None
    far.release.set()
    until(stores[0].keys)
    assert Records(stores[0]).all() == [record()]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_lookups_work_in_forked_children(tmp_path: Path) -> None:
    """Also if threads of the parent hold locks during the fork."""
    records, stop = Records(open_store(f"disk:{tmp_path}/s")), threading.Event()
    records.put(record())

    def always() -> None:
        while not stop.is_set():
            lookup(records)

    def forked() -> int:
        if child := os.fork():
            return child
        found = None
        try:
            signal.alarm(60)
            found, _said = lookup(records)
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
    assert codes == [0] * 40 and lookup(records)[0] is not None


def test_the_list_of_refused_records_is_shortened(stores: list[ByteStore]) -> None:
    Records(stores[0]).put(record())
    for threads in range(20):
        bad = record(key=changed(KEY, "threads", threads + 1))
        stores[0].put(Name.of(bad, b"rubbish").text, b"rubbish")
    one, found = lookup(Records(stores[0]))
    assert one is not None
    assert len(found.refused) == MAX_REFUSED + 1
    assert found.refused[-1] == f"{stores[0].url}: {20 - MAX_REFUSED} more that cannot be used"


def test_only_matching_records_are_read(tmp_path: Path) -> None:
    read: list[str] = []

    class RecordingStore(DirStore):
        def get_many(self, keys: Iterable[str], most: int = 2**20) -> Fetched:
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
    store = RecordingStore(tmp_path)
    records = Records(store)
    for each in (one, other):
        records.put(each)
    for filter_, found in (
        (RecordFilter(model="cd" * 32), [other]),
        (RecordFilter(target="model.py:Net"), [one]),
        (RecordFilter(id=one.key.id, batch=64), [one]),
        (RecordFilter(id=one.key.id, batch=8), []),
    ):
        read.clear()
        assert [hit.record for hit in records.look_into(store, filter_).held] == found
        assert len(read) == len(found)
    assert RecordFilter(id=one.key.id, batch=64).question() == {"id": one.key.id, "batch": 64}
    records.put(newer)
    for most, more in ((1, 1), (2, 0)):
        read.clear()
        listing = records.look_into(store, RecordFilter(similar_to=one.key, family="f0", most=most))
        assert {hit.record for hit in listing.held} == {one, newer} and len(listing.left) == more
        assert len(read) == most + 1  # its own model's record, and the newest others


def near(number: int, *differs: Difference, signed: bool = True) -> NearMiss:
    where = {"target": "model.py:Net", "store": "dir:/a"}
    return NearMiss(id=f"{number}", signed=signed, differs=differs, **where)


def test_the_text_of_a_miss() -> None:
    edited = Difference(field="code", wanted="edited since", found="as tuned")
    strict = Difference(field="deterministic", wanted=False, found=True)
    given = {"shapes": ((8, 3, 256, 256),), "mode": "train", "deterministic": False}
    given |= {"model_args": Config(a=1, b="x")}
    explanation = Explanation(
        target="model.py:Net",
        query=Query(environment=ENVIRONMENT, given=given, model=KEY.model),
        reason="nothing there",
        stores=[("dir:/a", "1 record"), ("redis://b", "did not answer")],
        refused=["1 is damaged", "2 is not signed"],
        near_misses=(near(16, signed=False), *[near(32, edited, strict)] * (MAX_LISTED + 1)),
    )
    *lines, more = str(explanation).splitlines()
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


def test_sizes_are_shown_in_a_fitting_unit() -> None:
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
def test_uninformative_intervals_are_not_shown(low: float, high: float, text: str) -> None:
    assert interval(low, high) == text
    assert speedup(1.9, low, high) == (text if text == "could not tell" else f"1.90x ({text})")
