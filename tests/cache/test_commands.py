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
    with pytest.raises(UsageError, match=f"several records match: {GOOD.id}, {SMALL.id}"):
        run("forget", GOOD.key.id, "--cache", url)
    shape, none = "expected e.g.", "no such record"
    for wrong in (
        ("", shape),
        ("@64", shape),
        ("../x", shape),
        (GOOD.id + "0", none),
        ("*", shape),
    ):
        with pytest.raises(UsageError, match=wrong[1]):
            run("forget", wrong[0], "--cache", url)
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
    removed = run("gc", "--cache", url, "--yes")
    assert removed == said.splitlines()[0].replace("would go", "removing") + "\n"
    assert len(store.keys()) == 3
    assert run("gc", "--cache", url) == "nothing to remove\n"
    assert newer in there(url)


def test_artifacts_are_shown_carried_tidied_and_forgotten(url: str, tmp_path: Path) -> None:
    keep(url, GOOD, SMALL)
    records = open_records(url)
    (store,) = records.stores
    tools = Tools(torch="2.11.0", triton="3.6.0", python="3.11.7")
    fits = Purpose.of(GOOD, GOOD.winner("loop").config, ENVIRONMENT, tools)
    other = replace(fits, config="ab" * 6)
    for purpose in (fits, other):
        records.artifacts.keep(b"code", purpose, store)
    size = store.sizes()
    said = json.loads(run("show", GOOD.id, "--cache", url, "--json"))["artifacts"]
    assert sorted(one["uses"] for one in said)[0] == [] and "loop" in str(said)
    assert "for no advised config, in dir:" in run("show", GOOD.id, "--cache", url)
    one = sum(size.values()) // 2
    assert run("gc", "--cache", url).splitlines() == [
        f"would go  {GOOD.id}  superseded: {one} B of artifacts: their config is no longer advised"
        f"  ({url})",
        "nothing was removed; to remove, add --yes",
    ]
    gone = json.loads(run("gc", "--cache", url, "--yes", "--json"))
    assert not gone["stuck"]
    (name,) = store.sizes()
    assert fits.label in name and BLOBS + gone["records"][0]["name"] in size
    carried = run("sync", url, f"dir:{tmp_path}/other")
    assert f"added    {GOOD.id}  {one} B of artifacts" in carried
    run("forget", SMALL.id, "--cache", url)
    assert [*store.sizes()] == [name]
    store.put(name, b"\0" * 1000)
    store.put(foreign := f"{BLOBS}{fits.label}.{'ab' * 6}", b"code")
    shown = run("show", GOOD.id, "--cache", url)
    for why in ("in an unknown format", "signed with another's key"):
        assert f", in {url}; refused: {why}\n" in shown
    assert run("gc", "--cache", url, "--only", "superseded").endswith("nothing to remove\n")
    assert run("gc", "--cache", url, "--yes", "--only", "damaged").splitlines() == [
        f"removing  {GOOD.id}  damaged: 1000 B of artifacts: in an unknown format  ({url})",
    ]
    assert [*store.sizes()] == [foreign]
    said = run("forget", GOOD.id, "--cache", url)
    assert said == f"forgetting {GOOD.id} model.py:Net (1 version)\n"
    assert store.sizes() == {}


@pytest.mark.parametrize("why", ["", "another GPU", "not told which", "stale", "less effort"])
def test_gc_takes_what_the_same_gpu_has_outlived(url: str, why: str) -> None:
    gpu = {"another GPU": "GPU-2", "not told which": ""}.get(why, "GPU-1")
    effort = "quick" if why == "less effort" else "normal"
    provenance = replace(GOOD.provenance, created=1.72e9, device_uuid=gpu, effort=effort)
    key = changed(GOOD.key, "software.driver", "590.2")
    stale = "slower by now" if why == "stale" else ""
    # Two were measured under the old driver, one of them again under the new.
    keep(url, GOOD, SMALL, replace(GOOD, key=key, provenance=provenance, stale=stale))
    going = f"{GOOD.id}  stale: driver 580.1 -> 590.2 on the same GPU since  ({url})\n"
    said = run("gc", "--cache", url, "--yes")
    assert said == ("nothing to remove\n" if why else f"removing  {going}")
    assert len(there(url)) == (3 if why else 2)


def test_gc_of_what_cannot_be_removed_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from advisor.cache.stores.dir import DirStore
    from advisor.errors import StoreError

    newer = replace(GOOD, provenance=replace(GOOD.provenance, created=1.72e9))
    keep(url, GOOD, newer)

    def refuse(_store: object, _key: str) -> bool:
        raise StoreError("cache: read-only")

    monkeypatch.setattr(DirStore, "delete", refuse)
    said = run("gc", "--cache", url, "--yes", code=1)
    assert f"{GOOD.id}: cache: read-only; this version stays" in said


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
def test_what_is_carried(url: str, tmp_path: Path, words: list[str], wanted: list[Record]) -> None:
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
    assert "store" in listed.splitlines()[0]
    assert listed.endswith(f"store 1: {url}\nstore 2: {other}\n")
    numbers = {line.split("@")[0]: line.split()[-1] for line in listed.splitlines() if "@" in line}
    assert numbers == {GOOD.key.id: "1", INFER.key.id: "2"}
    for one, where in ((GOOD, url), (INFER, other)):
        assert f"  store           {where}\n" in run("show", one.id, "--cache", f"{url},{other}")
    said = json.loads(run("show", "--cache", f"{url},{other}", "--json"))["records"]
    assert {one["id"]: one["store"] for one in said} == {GOOD.id: url, INFER.id: other}
    assert "dir:" not in run("show", "--cache", url)
