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


every = pytest.mark.parametrize("case", hostile.CASES, ids=lambda case: case.name, indirect=True)


@every
def test_what_is_hostile_costs_nothing_else(case: hostile.Case, tmp_path: Path) -> None:
    url = case.make(tmp_path)
    before = set(tmp_path.iterdir())
    records = Records(open_stores(url), keyring=hostile.MINE)

    def choose(held: object) -> Chosen:
        return Chosen()

    began = time.monotonic()
    said = ask(records, RecordFilter(target="model.py:Net"), choose, deadline_s=0.5)
    assert time.monotonic() - began < 30  # not for ever; on a slow machine too
    found = [one.record for one in said.held]
    if case.honest:
        assert record() in found
    if case.refused:
        assert hostile.OTHER not in found and len(found) <= 1
    if case.refused and not said.failed:
        assert case.refused in " ".join(said.refused)
    for line in [*said.refused, *map(str, said.failed)]:
        assert line.isprintable(), line
    assert set(tmp_path.iterdir()) == before
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "case",
    [case for case in hostile.CASES if case.name != "an exclusive lock"],
    ids=lambda case: case.name,
    indirect=True,
)
def test_commands_on_it_end_with_one_line_and_take_nothing(
    case: hostile.Case, tmp_path: Path
) -> None:
    url = case.make(tmp_path)
    records = Records(open_stores(url), keyring=hostile.MINE)
    store = records.stores[-1]
    target = open_store(f"dir:{tmp_path}/target")
    said = []
    for act in (
        records.all,
        lambda: records.health(store),
        lambda: garbage(records, store),
        lambda: list(exchange.carry(exchange.contents(store), Records(target), target)),
        lambda: records.put(record(created=1.71e9)),
        lambda: records.studies,
        lambda: records.get(record().id),
    ):
        try:
            said.append(str(act()))
        except StoreError as exc:
            said.append(str(exc))
            assert str(exc).isprintable()
    assert said[2] == "[]" or "cache" in said[2] or "pack" in said[2]  # gc takes nothing of others'
    if case.honest:
        assert record() in Records(target).all()
    assert not (tmp_path / "ran").exists()
    if case.honest and case.refused and case.name != "another's name" and url[:4] == "dir:":
        mine = records.all()
        going = records.named(hostile.OTHER.id)
        removed = records.remove(going)
        assert removed + len(records.stuck) == len(going) > 0
        assert records.all() == mine
