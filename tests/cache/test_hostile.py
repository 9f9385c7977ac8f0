"""The corpus of tests/hostile.py, at the level of records: refused alone, in time, removable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.cache import exchange
from advisor.cache.asking import Chosen, ask
from advisor.cache.garbage import garbage
from advisor.cache.reader import RecordFilter
from advisor.cache.records import Records
from advisor.cache.stores import open_store, open_stores
from advisor.errors import StoreError
from tests import hostile
from tests.cache.examples import record


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[hostile.Case]:
    yield request.param
    while hostile.HELD:
        hostile.HELD.pop().close()


@pytest.mark.parametrize("case", hostile.CASES, ids=lambda case: case.name, indirect=True)
def test_what_is_hostile_costs_nothing_else(case: hostile.Case, tmp_path: Path) -> None:
    url = case.make(tmp_path)
    before = set(tmp_path.iterdir())
    records = Records(open_stores(url), keyring=hostile.MINE)
    wanted, began = RecordFilter(target="model.py:Net"), time.monotonic()
    said = ask(records, wanted, lambda _held: Chosen(), deadline_s=0.5)
    assert time.monotonic() - began < 30  # it ends, on a slow machine too
    found = [one.record for one in said.held]
    assert not case.honest or record() in found
    if case.refused:
        assert hostile.OTHER not in found and len(found) <= 1
        assert said.failed or case.refused in " ".join(said.refused)
    assert " ".join([*said.refused, *map(str, said.failed)]).isprintable()
    assert set(tmp_path.iterdir()) == before
    if case.name != "an exclusive lock":  # each command would wait for it
        work_on(case, records, tmp_path, removes=url.startswith("dir:"))
    assert not (tmp_path / "ran").exists()


def work_on(case: hostile.Case, records: Records, tmp_path: Path, removes: bool) -> None:
    """What commands do ends with one line, takes nothing of others, and removes what it names."""
    store, target = records.stores[-1], open_store(f"dir:{tmp_path}/target")
    for act in (
        records.all,
        lambda: records.health(store),
        lambda: garbage(records, store) == [] or pytest.fail("gc takes what others wrote"),
        lambda: list(exchange.carry(exchange.contents(store), Records(target), target)),
        lambda: records.put(record(created=1.71e9)),
        lambda: records.studies,
        lambda: records.get(record().id),
    ):
        try:
            act()
        except StoreError as exc:
            assert str(exc).isprintable()
    assert not case.honest or record() in Records(target).all()
    if case.honest and case.refused and case.name != "another's name" and removes:
        mine, going = records.all(), records.named(hostile.OTHER.id)
        assert records.remove(going) + len(records.stuck) == len(going) > 0
        assert records.all() == mine
