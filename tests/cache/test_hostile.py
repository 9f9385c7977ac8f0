"""Hostile bytes in a store: they decode to a record or are refused; nothing is executed."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.cache import exchange
from advisor.cache.asking import Explanation, ask
from advisor.cache.codec import decode, encode
from advisor.cache.garbage import find_garbage
from advisor.cache.match import MISS, Query
from advisor.cache.reader import RecordFilter
from advisor.cache.records import Records
from advisor.cache.stores import open_store, open_stores
from advisor.cache.stores.disk import PackStore, write_pack
from advisor.errors import RecordDamaged, StoreDamaged, StoreError
from advisor.tuners.knobs import refusal
from tests import hostile
from tests.cache.examples import ENVIRONMENT, MINE, record
from tests.cache.mutations import corpus, mutated

ROOT = Path(__file__).parents[2]


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_mutations_are_records_or_refused(seed: int) -> None:
    for data in itertools.islice(mutated(corpus(), random.Random(seed)), 20):
        try:
            record = decode(data)
        except RecordDamaged as exc:
            assert "\n" not in str(exc) and len(str(exc)) < 300
        else:
            refusal(record)
            assert decode(encode(record)) == record


def test_many_take_no_memory_and_run_nothing() -> None:
    """Runs in a subprocess, so that its peak memory and system calls can be measured."""
    done = subprocess.run(
        [sys.executable, "benchmarks/fuzz.py", "--count", "5000", "--results", "-"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_a_mutated_pack_is_harmless(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    dice = random.Random(seed)
    path = tmp_path_factory.mktemp("pack") / "records.pack"
    seeds = corpus()[:3]
    write_pack(path, [[(f"record/{n}", data) for n, data in enumerate(seeds)]])
    data = bytearray(path.read_bytes())
    for _ in range(dice.randrange(1, 5)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    path.write_bytes(bytes(data[: dice.randrange(len(data))] if dice.random() < 0.3 else data))
    pack = PackStore(path)
    try:
        found = pack.get_many(pack.keys())
    except StoreDamaged as exc:
        assert "\n" not in str(exc)
        return
    for got in found.values():
        if isinstance(got, bytes):
            with contextlib.suppress(RecordDamaged):
                assert got in seeds or decode(got)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[hostile.Case]:
    yield request.param
    while hostile.HELD:
        hostile.HELD.pop().close()


@pytest.mark.parametrize("case", hostile.CASES, ids=lambda case: case.name, indirect=True)
def test_hostile_store_contents_harm_nothing_else(case: hostile.Case, tmp_path: Path) -> None:
    url = case.make(tmp_path)
    before = set(tmp_path.iterdir())
    records = Records(open_stores(url), keyring=MINE)
    wanted, began = RecordFilter(target="model.py:Net"), time.monotonic()
    explanation = Explanation(target="", query=Query(environment=ENVIRONMENT))
    _match, stored = ask(records, wanted, lambda _held: MISS, explanation, deadline_s=0.5)
    assert time.monotonic() - began < 30  # generous, for slow machines
    found = [one.record for one in stored]
    assert not case.honest or record() in found
    if case.refused:
        assert hostile.OTHER not in found and len(found) <= 1
        assert explanation.failed or case.refused in " ".join(explanation.refused)
    assert " ".join([*explanation.refused, *explanation.failed]).isprintable()
    assert set(tmp_path.iterdir()) == before
    if case.name != "an exclusive lock":  # each command would wait for the lock
        run_commands(case, records, tmp_path, removes=url.startswith("dir:"))
    assert not (tmp_path / "ran").exists()


def run_commands(case: hostile.Case, records: Records, tmp_path: Path, removes: bool) -> None:
    """Each command gives at most a one-line error, and removes only what it names."""
    store, target = records.stores[-1], open_store(f"dir:{tmp_path}/target")
    for act in (
        records.all,
        lambda: records.health(store),
        lambda: find_garbage(records) == [] or pytest.fail("gc takes what others wrote"),
        lambda: list(exchange.copy_records(exchange.contents(store), Records(target), target)),
        lambda: records.put(record(created=1.71e9)),
        lambda: records.studies,
        lambda: records.one(record().id),
    ):
        try:
            act()
        except StoreError as exc:
            assert str(exc).isprintable()
    assert not case.honest or record() in Records(target).all()
    if case.honest and case.refused and case.name != "another's name" and removes:
        mine, going = records.all(), records.named(hostile.OTHER.id)
        assert len(records.remove(going)) + len(records.stuck) == len(going) > 0
        assert records.all() == mine
