"""forget, gc, export, import and sync: what they say first, and that they take exactly that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from advisor.cache.artifacts import Purpose, Tools
from advisor.cache.codec import encode
from advisor.cache.name import Name
from advisor.cache.record import Record
from advisor.cache.stores import BLOBS
from advisor.cli import cli
from advisor.errors import UsageError
from advisor.open_store import open_records
from tests.cache.examples import ENVIRONMENT, KEY, changed, record

GOOD, INFER = record(), record(key=changed(KEY, "mode", "infer"))
SMALL = record(key=changed(KEY, "shapes", ((8, 3, 256, 256),)))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"dir:{tmp_path}/store"


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def there(url: str) -> list[Record]:
    return sorted(open_records(url).all(), key=lambda one: one.id)


def keep(url: str, *several: Record) -> None:
    for one in several:
        open_records(url).put(one)


def test_forget_takes_the_one_that_it_names(url: str) -> None:
    keep(url, GOOD, SMALL, INFER)
    with pytest.raises(UsageError, match=f"several begin so: {GOOD.id}, {SMALL.id}"):
        run("forget", GOOD.key.id, "--cache", url)
    for wrong in ("", "@", "@64", "../x", GOOD.id + "0", "*"):
        with pytest.raises(UsageError):
            run("forget", wrong, "--cache", url)
    assert len(there(url)) == 3
    said = run("forget", SMALL.id, "--cache", url)
    assert said == f"forgetting {SMALL.id} model.py:Net (1 version)\n"
    assert there(url) == sorted([GOOD, INFER], key=lambda one: one.id)


def test_forget_of_a_damaged_record_leaves_the_others(url: str) -> None:
    keep(url, GOOD, SMALL)
    (store,) = open_records(url).stores
    store.put(Name.of(INFER, b"rubbish").text, b"rubbish")
    said = run("forget", INFER.id, "--cache", url)
    assert said == f"forgetting {INFER.id} an unreadable record (1 version)\n"
    assert there(url) == sorted([GOOD, SMALL], key=lambda one: one.id)
    said = json.loads(run("forget", "--all", "--cache", url, "--json"))
    assert sorted(said["forgotten"]) == sorted([GOOD.id, SMALL.id])
    assert store.keys() == []


def test_gc_says_first_and_takes_exactly_that(url: str, tmp_path: Path) -> None:
    newer = replace(GOOD, provenance=replace(GOOD.provenance, created=1.72e9))
    keep(url, GOOD, newer, SMALL)
    (store,) = open_records(url).stores
    stranger = replace(INFER, stale="says a stranger")
    store.put(Name.of(stranger, encode(stranger)).text, encode(stranger))
    before = store.keys()
    said = run("gc", "--cache", url)
    assert said.startswith(f"would go  {GOOD.id}  superseded") and "--yes" in said
    assert store.keys() == before
    assert (
        run("gc", "--cache", url, "--yes")
        == said.splitlines()[0].replace("would go", "removing") + "\n"
    )
    assert len(store.keys()) == 3
    assert run("gc", "--cache", url) == "nothing to remove\n"
    assert newer in there(url)


def test_artifacts_are_shown_carried_tidied_and_forgotten(url: str, tmp_path: Path) -> None:
    keep(url, GOOD, SMALL)
    records = open_records(url)
    (store,) = records.stores
    tools = Tools(torch="2.11.0", triton="3.6.0", python="3.11.7")
    fits = Purpose.of(GOOD, GOOD.winner("loop").config, ENVIRONMENT, tools)
    for purpose in (fits, replace(fits, config="ab" * 6)):
        records.artifacts.keep(b"code", purpose, store)
    size = store.sizes()
    said = json.loads(run("show", GOOD.id, "--cache", url, "--json"))["artifacts"]
    assert sorted(one["uses"] for one in said)[0] == [] and "loop" in str(said)
    assert "for nothing that is advised, in dir:" in run("show", GOOD.id, "--cache", url)
    two = sum(size.values())
    assert run("gc", "--cache", url).splitlines() == [
        f"artifacts  2, {two} B  ({url})",
        f"would go  {GOOD.id}  superseded: {two // 2} B of artifacts: their config is advised no "
        f"more  ({url})",
        "nothing was removed; to remove, add --yes",
    ]
    gone = json.loads(run("gc", "--cache", url, "--yes", "--json"))
    total = {"store": url, "number": 2, "bytes": two, "foreign": 0}
    assert gone["artifacts"] == [total] and not gone["stuck"]
    (name,) = store.sizes()
    assert fits.label in name and BLOBS + gone["records"][0]["name"] in size
    said_of = run("sync", url, f"dir:{tmp_path}/other")
    assert f"added    {GOOD.id}  {two // 2} B of artifacts" in said_of
    run("forget", SMALL.id, "--cache", url)
    assert [*store.sizes()] == [name]
    said_of = run("forget", GOOD.id, "--cache", url)
    what = f"1 version, {two // 2} B of artifacts"
    assert said_of == f"forgetting {GOOD.id} model.py:Net ({what})\n"
    assert store.sizes() == {}


def test_artifacts_that_are_refused_are_shown_as_such(url: str) -> None:
    keep(url, GOOD)
    records = open_records(url)
    (store,) = records.stores
    tools = Tools(torch="2.11.0", triton="3.6.0", python="3.11.7")
    fits = Purpose.of(GOOD, GOOD.winner("loop").config, ENVIRONMENT, tools)
    records.artifacts.keep(b"code", fits, store)
    (name,) = store.sizes()
    store.put(name, b"\0" * 1000)
    store.put(f"{BLOBS}{fits.label}.{'ab' * 6}", b"code")
    said = run("show", GOOD.id, "--cache", url)
    assert said.count("  artifacts       ") == 2
    for why in ("none that this version reads", "signed with another's key"):
        assert f", in {url}; refused: {why}\n" in said
    shown = json.loads(run("show", GOOD.id, "--cache", url, "--json"))["artifacts"]
    assert all(one["refused"] for one in shown)
    assert run("gc", "--cache", url, "--only", "superseded").endswith("nothing to remove\n")
    lines = run("gc", "--cache", url, "--yes", "--only", "damaged").splitlines()
    assert lines == [
        f"artifacts  2, 1004 B, 1 signed with another's key  ({url})",
        f"removing  {GOOD.id}  damaged: 1000 B of artifacts: none that this version reads  ({url})",
    ]
    assert [*store.sizes()] == [f"{BLOBS}{fits.label}.{'ab' * 6}"]
    gone = json.loads(run("forget", GOOD.id, "--cache", url, "--json"))
    assert gone == {"forgotten": [GOOD.id], "damaged": 0, "artifacts_bytes": 4}


def test_gc_takes_what_the_same_gpu_has_outlived(url: str) -> None:
    key = changed(GOOD.key, "software.driver", "590.2")
    later = replace(GOOD, key=key, provenance=replace(GOOD.provenance, created=1.72e9))
    # Two were measured under the old driver, one of them again under the new.
    keep(url, GOOD, SMALL, later)
    assert run("gc", "--cache", url).startswith(
        f"would go  {GOOD.id}  stale: driver 580.1 -> 590.2 on the same GPU since  ({url})\n"
        "nothing was removed"
    )
    run("gc", "--cache", url, "--yes")
    assert there(url) == sorted([SMALL, later], key=lambda one: one.id)


@pytest.mark.parametrize("why", ["another GPU", "not told which", "stale", "less effort"])
def test_gc_leaves_what_was_not_outlived(url: str, why: str) -> None:
    gpu = {"another GPU": "GPU-2", "not told which": ""}.get(why, "GPU-1")
    effort = "quick" if why == "less effort" else "normal"
    provenance = replace(GOOD.provenance, created=1.72e9, device_uuid=gpu, effort=effort)
    later = replace(
        GOOD,
        key=changed(GOOD.key, "software.driver", "590.2"),
        provenance=provenance,
        stale="slower by now" if why == "stale" else "",
    )
    keep(url, GOOD, later)
    assert run("gc", "--cache", url) == "nothing to remove\n"


def test_gc_of_what_cannot_be_removed_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from advisor.cache.stores.dir import DirStore
    from advisor.errors import StoreError

    newer = replace(GOOD, provenance=replace(GOOD.provenance, created=1.72e9))
    keep(url, GOOD, newer)

    def refuse(_store: object, _key: str) -> bool:
        raise StoreError("cache: read-only")

    monkeypatch.setattr(DirStore, "delete", refuse)
    said = run("gc", "--cache", url, "--yes", code=1)
    assert f"{GOOD.id}: cache: read-only; it stays" in said


def test_packs_and_sync_carry_all_of_it(url: str, tmp_path: Path) -> None:
    keep(url, GOOD, SMALL)
    pack, other = tmp_path / "records.pack", f"disk:{tmp_path}/other"
    assert run("export", str(pack), "--cache", url) == f"2 records in {pack}\n"
    run("import", str(pack), "--cache", other)
    assert there(other) == there(url)
    assert "2 known" in run("sync", url, other)
    keep(url, INFER)
    assert run("sync", url, other, "--key", INFER.id).startswith(f"added    {INFER.id}")
    assert there(other) == there(url)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--key", INFER.id], [INFER]),
        (["--key", GOOD.key.id], [GOOD, SMALL]),
        (["--target", "other"], []),
        (["--target", "model.py"], [GOOD, SMALL, INFER]),
        (["--device", "h200"], [GOOD, SMALL, INFER]),
        (["--device", "a100"], []),
        (["--key", f"{GOOD.key.id}@8", "--key", INFER.id[:5]], [SMALL, INFER]),
    ],
)
def test_only_what_is_wanted_is_carried(
    url: str, tmp_path: Path, words: list[str], wanted: list[Record]
) -> None:
    keep(url, GOOD, SMALL, INFER)
    (store,) = open_records(url).stores
    store.put(Name.of(INFER, b"rubbish").text, b"rubbish")
    other = f"dir:{tmp_path}/other"
    said = run("sync", url, other, *words, code=1)
    assert "1 refused" in said
    assert there(other) == sorted(wanted, key=lambda one: one.id)


def test_show_says_which_store_has_a_record(url: str, tmp_path: Path) -> None:
    other = f"dir:{tmp_path}/other"
    keep(url, GOOD)
    keep(other, INFER)
    listed = run("show", "--cache", f"{url},{other}")
    assert "store" in listed.splitlines()[0] and listed.count("dir:") == 2
    for one, where in ((GOOD, url), (INFER, other)):
        assert f"  store           {where}\n" in run("show", one.id, "--cache", f"{url},{other}")
    said = json.loads(run("show", "--cache", f"{url},{other}", "--json"))["records"]
    assert {one["id"]: one["store"] for one in said} == {GOOD.id: url, INFER.id: other}
    assert "dir:" not in run("show", "--cache", url)
