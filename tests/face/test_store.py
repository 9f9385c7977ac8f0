"""advisor.Store: list, copy and prune records from Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import advisor
from advisor.cache.name import Name
from advisor.open_store import open_records
from tests.cache import examples, servers

MADE = examples.record()


@pytest.fixture
def store(tmp_path: Path) -> advisor.Store:
    url = f"dir:{tmp_path}/one"
    open_records(url).put(MADE)
    return advisor.Store(url)


def test_records_lists_the_records_of_a_store(store: advisor.Store, tmp_path: Path) -> None:
    assert [record.id for record in store.records()] == [MADE.id]
    assert advisor.Store(f"dir:{tmp_path}/none").records() == []
    with pytest.raises(advisor.UsageError):
        advisor.Store(3)  # type: ignore[arg-type]


def test_sync_copies_records(store: advisor.Store, tmp_path: Path) -> None:
    other = advisor.Store(f"dir:{tmp_path}/two")
    assert [one.outcome for one in store.sync(other)] == ["added"]
    assert [record.id for record in other.records()] == [MADE.id]
    assert [one.outcome for one in store.sync(f"dir:{tmp_path}/two")] == ["known"]
    assert store.sync(f"dir:{tmp_path}/three", only=lambda record: False) == []
    with pytest.raises(advisor.UsageError, match="one store for each side"):
        advisor.Store([f"dir:{tmp_path}/one", f"dir:{tmp_path}/two"]).sync(other)


def test_export_and_import_copy_records(store: advisor.Store, tmp_path: Path) -> None:
    pack = str(tmp_path / "nets.pack")
    assert store.export(pack) == 1
    other = advisor.Store(f"dir:{tmp_path}/two")
    assert [one.outcome for one in other.import_(pack)] == ["added"]
    assert [record.id for record in other.records()] == [MADE.id]
    with pytest.raises(advisor.NoRecord):
        store.export(pack, only=lambda record: False)
    with pytest.raises(advisor.UsageError, match="no such file"):
        store.import_(tmp_path / "none.pack")


def test_prune_removes_records_unless_it_is_a_dry_run(store: advisor.Store) -> None:
    newer = replace(MADE.provenance, created=MADE.provenance.created + 1.0)
    open_records(store.urls).put(replace(MADE, provenance=newer))
    (removed,) = store.prune()
    assert removed.key.record_id == MADE.id and removed.reason.startswith("superseded")
    assert len(store.prune()) == 1, "a dry run removes nothing"
    assert len(store.prune(dry_run=False)) == 1
    assert store.prune() == [] and [one.id for one in store.records()] == [MADE.id]


USES: dict[str, Callable[[advisor.Store, Path], object]] = {
    "records": lambda store, _folder: store.records(),
    "export": lambda store, folder: store.export(folder / "pack"),
    "prune": lambda store, _folder: store.prune(),
    "sync from": lambda store, folder: store.sync(f"dir:{folder}/one"),
    "sync to": lambda store, folder: advisor.Store(f"dir:{folder}/one").sync(store),
    "import_": lambda store, folder: store.import_(folder / "one.pack"),
}


@pytest.mark.parametrize("use", USES)
def test_an_unreachable_store_is_not_replaced_by_the_default_one(
    store: advisor.Store, tmp_path: Path, use: str
) -> None:
    """The default store has a record too, which must not be used instead."""
    store.export(tmp_path / "one.pack")
    open_records(None).put(MADE)
    unreachable = advisor.Store(f"http://127.0.0.1:{servers.free_port()}?timeout=1s")
    with pytest.raises(advisor.StoreError, match="refused") as caught:
        USES[use](unreachable, tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "pack").exists()


@pytest.mark.parametrize("use", ["records", "export"])
def test_unreadable_records_warn_once(store: advisor.Store, tmp_path: Path, use: str) -> None:
    (inner,) = open_records(store.urls).stores
    for threads in (1, 2):
        bad = examples.record(key=examples.changed(examples.KEY, "threads", threads))
        inner.put(Name.of(bad, b"rubbish").text, b"rubbish")
    with pytest.warns(advisor.AdvisorWarning, match="not msgpack.*; 1 more cannot") as caught:
        USES[use](store, tmp_path)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    with warnings.catch_warnings(action="error"):
        assert len(advisor.Store(f"dir:{tmp_path}/none").records()) == 0
    unreachable = advisor.Store([*store.urls, f"http://127.0.0.1:{servers.free_port()}?timeout=1s"])
    with pytest.warns(advisor.AdvisorWarning, match="refused"):
        assert len(unreachable.records()) == 1
