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
from advisor.cache.stores.dir import DirStore
from advisor.cli import cli
from advisor.errors import StoreError, UsageError
from advisor.open_store import open_records
from tests.cache import examples
from tests.cache.examples import ENVIRONMENT, record

GOOD, INFER, SMALL = record(), record(key=examples.INFER), record(key=examples.SMALL)
NEWER = replace(GOOD, provenance=replace(GOOD.provenance, created=1.72e9))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"dir:{tmp_path}/store"


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def there(url: str) -> list[str]:
    return sorted(one.id for one in open_records(url).all())


def ids(*several: Record) -> list[str]:
    return sorted(one.id for one in several)


def keep(url: str, *several: Record) -> None:
    for one in several:
        open_records(url).put(one)


def put(url: str, name: str, data: bytes) -> None:
    open_records(url).stores[0].put(name, data)


def test_forget_takes_the_one_that_it_names(url: str) -> None:
    keep(url, GOOD, SMALL, INFER)
    with pytest.raises(UsageError, match=f"several records match: {GOOD.id}, {SMALL.id}"):
        run("forget", GOOD.key.id, "--cache", url)
    for wrong in ("", "@64", "../x", "*"):
        with pytest.raises(UsageError, match=r"expected e\.g\."):
            run("forget", wrong, "--cache", url)
    with pytest.raises(UsageError, match="no such record"):
        run("forget", GOOD.id + "0", "--cache", url)
    assert there(url) == ids(GOOD, SMALL, INFER)
    said = run("forget", SMALL.id, "--cache", url)
    assert said == f"forgetting {SMALL.id} model.py:Net (1 version)\n"
    assert there(url) == ids(GOOD, INFER)


def test_forget_of_a_damaged_record_leaves_the_others(url: str) -> None:
    keep(url, GOOD, SMALL)
    put(url, Name.of(INFER, b"rubbish").text, b"rubbish")
    said = run("forget", INFER.id, "--cache", url)
    assert said == f"forgetting {INFER.id} an unreadable record (1 version)\n"
    assert there(url) == ids(GOOD, SMALL)
    said = json.loads(run("forget", "--all", "--cache", url, "--json"))
    assert sorted(said["forgotten"]) == ids(GOOD, SMALL)
    assert open_records(url).stores[0].keys() == []


def test_gc_says_first_and_takes_exactly_that(url: str) -> None:
    keep(url, GOOD, NEWER, SMALL)
    (store,) = open_records(url).stores
    stranger = replace(INFER, stale="says a stranger")
    put(url, Name.of(stranger, encode(stranger)).text, encode(stranger))
    before = store.keys()
    said = run("gc", "--cache", url)
    assert said.startswith(f"would go  {GOOD.id}  superseded") and "--yes" in said
    assert store.keys() == before
    removed = run("gc", "--cache", url, "--yes")
    assert removed == said.splitlines()[0].replace("would go", "removing") + "\n"
    assert len(store.keys()) == 3
    assert run("gc", "--cache", url) == "nothing to remove\n"
    assert NEWER in open_records(url).all()


def test_artifacts_are_shown_carried_tidied_and_forgotten(url: str, tmp_path: Path) -> None:
    keep(url, GOOD, SMALL)
    records = open_records(url)
    (store,) = records.stores
    tools = Tools(torch="2.11.0", triton="3.6.0", python="3.11.7")
    fits = Purpose.of(GOOD, GOOD.winner("loop").config, ENVIRONMENT, tools)
    for purpose in (fits, replace(fits, config="ab" * 6)):
        records.artifacts.keep(b"code", purpose, store)
    one = sum(store.sizes().values()) // 2
    said = json.loads(run("show", GOOD.id, "--cache", url, "--json"))["artifacts"]
    assert sorted(one["uses"] for one in said)[0] == [] and "loop" in str(said)
    assert "for no advised config, in dir:" in run("show", GOOD.id, "--cache", url)
    why = f"superseded: {one} B of artifacts: their config is no longer advised"
    removed = run("gc", "--cache", url, "--yes", "--only", "superseded")
    assert removed == f"removing  {GOOD.id}  {why}  ({url})\n"
    carried = run("sync", url, f"dir:{tmp_path}/other")
    assert f"added    {GOOD.id}  {one} B of artifacts" in carried
    run("forget", SMALL.id, "--cache", url)
    (name,) = store.sizes()
    store.put(name, b"\0" * 1000)
    shown = run("show", GOOD.id, "--cache", url)
    assert f", in {url}; refused: in an unknown format\n" in shown
    run("forget", GOOD.id, "--cache", url)
    assert store.sizes() == {}


def test_what_cannot_be_removed_is_said_to_stay(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(url, GOOD, NEWER)

    def refuse(_store: object, _key: str) -> bool:
        raise StoreError("cache: read-only")

    monkeypatch.setattr(DirStore, "delete", refuse)
    said = run("gc", "--cache", url, "--yes", code=1)
    stays = f"{GOOD.id}: cache: read-only; this version stays"
    assert stays in said
    said = run("forget", GOOD.id, "--cache", url, "--json", code=1)
    assert stays in said and "forgetting" not in said
    assert json.loads(said.splitlines()[-1]) == {"forgotten": [], "damaged": 0}


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
    put(url, Name.of(INFER, b"rubbish").text, b"rubbish")
    other = f"dir:{tmp_path}/other"
    assert "1 refused" in run("sync", url, other, *words, code=1)
    assert there(other) == ids(*wanted)
    *_refused, document = run("sync", url, other, *words, "--json", code=1).splitlines()
    said = json.loads(document)["records"]
    assert sorted(one["outcome"] for one in said) == ["known"] * len(wanted) + ["refused"]


def test_show_says_which_store_has_a_record(url: str, tmp_path: Path) -> None:
    other = f"dir:{tmp_path}/other"
    keep(url, GOOD)
    keep(other, INFER)
    both = ("--cache", f"{url},{other}")
    listed = run("show", *both)
    assert "store" in listed.splitlines()[0]
    assert listed.endswith(f"store 1: {url}\nstore 2: {other}\n")
    numbers = {line.split("@")[0]: line.split()[-1] for line in listed.splitlines() if "@" in line}
    assert numbers == {GOOD.key.id: "1", INFER.key.id: "2"}
    for one, where in ((GOOD, url), (INFER, other)):
        assert f"  store           {where}\n" in run("show", one.id, *both)
    said = json.loads(run("show", *both, "--json"))["records"]
    assert {one["id"]: one["store"] for one in said} == {GOOD.id: url, INFER.id: other}
    assert "dir:" not in run("show", "--cache", url)
