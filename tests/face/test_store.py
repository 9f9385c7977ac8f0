"""Store: what a store has, carried elsewhere and tidied, from Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import advisor
from advisor.opening import open_records
from tests.cache import examples

MADE = examples.record()


@pytest.fixture
def store(tmp_path: Path) -> advisor.Store:
    url = f"dir:{tmp_path}/one"
    open_records(url).put(MADE)
    return advisor.Store(url)


def test_its_records(store: advisor.Store, tmp_path: Path) -> None:
    assert [record.id for record in store.records()] == [MADE.id]
    assert advisor.Store(f"dir:{tmp_path}/none").records() == []
    with pytest.raises(advisor.UsageError):
        advisor.Store(3)  # type: ignore[arg-type]


def test_sync_copies(store: advisor.Store, tmp_path: Path) -> None:
    other = advisor.Store(f"dir:{tmp_path}/two")
    assert [one.outcome for one in store.sync(other)] == ["added"]
    assert [record.id for record in other.records()] == [MADE.id]
    assert [one.outcome for one in store.sync(f"dir:{tmp_path}/two")] == ["known"]
    assert store.sync(f"dir:{tmp_path}/three", only=lambda record: False) == []
    with pytest.raises(advisor.UsageError, match="one store for each side"):
        advisor.Store([f"dir:{tmp_path}/one", f"dir:{tmp_path}/two"]).sync(other)


def test_a_pack_takes_them_elsewhere(store: advisor.Store, tmp_path: Path) -> None:
    pack = str(tmp_path / "nets.pack")
    assert store.export(pack) == 1
    other = advisor.Store(f"dir:{tmp_path}/two")
    assert [one.outcome for one in other.import_(pack)] == ["added"]
    assert [record.id for record in other.records()] == [MADE.id]
    with pytest.raises(advisor.NoRecord):
        store.export(pack, only=lambda record: False)
    with pytest.raises(advisor.UsageError, match="no such file"):
        store.import_(tmp_path / "none.pack")


def test_prune_removes_once_it_is_told_to(store: advisor.Store) -> None:
    newer = replace(MADE.provenance, created=MADE.provenance.created + 1.0)
    open_records(store.urls).put(replace(MADE, provenance=newer))
    (going,) = store.prune()
    assert going.what == MADE.id and going.reason.startswith("superseded")
    assert len(store.prune()) == 1, "a dry run removes nothing"
    assert len(store.prune(dry_run=False)) == 1
    assert store.prune() == [] and [one.id for one in store.records()] == [MADE.id]
