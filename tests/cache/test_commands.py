"""The commands forget, gc, sync and show: their output, and that they remove nothing else."""

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
from tests.face.commands import check_document

GOOD, INFER, SMALL = record(), record(key=examples.INFER), record(key=examples.SMALL)
NEWER = replace(GOOD, provenance=replace(GOOD.provenance, created=1.72e9))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"dir:{tmp_path}/store"


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == code, done.output
    if "--json" in words:
        check_document(words[0], done.stdout.splitlines()[-1])
    return done.output


def stored_ids(url: str) -> list[str]:
    return sorted(one.id for one in open_records(url).all())


def ids(*several: Record) -> list[str]:
    return sorted(one.id for one in several)


def put_all(url: str, *several: Record) -> None:
    for one in several:
        open_records(url).put(one)


def put_bytes(url: str, name: str, data: bytes) -> None:
    open_records(url).stores[0].put(name, data)


def test_forget_removes_only_the_named_record(url: str) -> None:
    put_all(url, GOOD, SMALL, INFER)
    with pytest.raises(UsageError, match=f"several records match: {GOOD.id}, {SMALL.id}"):
        run("forget", GOOD.key.id, "--cache", url)
    for wrong in ("", "@64", "../x", "*"):
        with pytest.raises(UsageError, match=r"expected e\.g\."):
            run("forget", wrong, "--cache", url)
    with pytest.raises(UsageError, match="no such record"):
        run("forget", GOOD.id + "0", "--cache", url)
    assert stored_ids(url) == ids(GOOD, SMALL, INFER)
    output = run("forget", SMALL.id, "--cache", url)
    assert output == f"forgetting {SMALL.id} model.py:Net (1 version)\n"
    assert stored_ids(url) == ids(GOOD, INFER)


def test_forget_removes_a_damaged_record_or_all(url: str) -> None:
    put_all(url, GOOD, SMALL)
    put_bytes(url, Name.of(INFER, b"rubbish").text, b"rubbish")
    output = run("forget", INFER.id, "--cache", url)
    assert output == f"forgetting {INFER.id} an unreadable record (1 version)\n"
    assert stored_ids(url) == ids(GOOD, SMALL)
    output = json.loads(run("forget", "--all", "--cache", url, "--json"))
    assert sorted(output["forgotten"]) == ids(GOOD, SMALL)
    assert open_records(url).stores[0].keys() == []


def test_gc_removes_exactly_what_it_announced(url: str) -> None:
    put_all(url, GOOD, NEWER, SMALL)
    (store,) = open_records(url).stores
    stranger = replace(INFER, stale="says a stranger")
    put_bytes(url, Name.of(stranger, encode(stranger)).text, encode(stranger))
    before = store.keys()
    output = run("gc", "--cache", url)
    assert output.startswith(f"would go  {GOOD.id}  superseded") and "--yes" in output
    assert store.keys() == before
    removed = run("gc", "--cache", url, "--yes")
    assert removed == output.splitlines()[0].replace("would go", "removing") + "\n"
    assert len(store.keys()) == 3
    assert run("gc", "--cache", url) == "nothing to remove\n"
    assert NEWER in open_records(url).all()


def test_show_gc_sync_and_forget_handle_artifacts(url: str, tmp_path: Path) -> None:
    put_all(url, GOOD, SMALL)
    records = open_records(url)
    (store,) = records.stores
    tools = Tools(torch="2.11.0", triton="3.6.0", python="3.11.7")
    fits = Purpose.of(GOOD, GOOD.winner("loop").config, ENVIRONMENT, tools)
    for purpose in (fits, replace(fits, config="ab" * 6)):
        records.artifacts.keep(b"code", purpose, store)
    one = sum(store.sizes().values()) // 2
    output = json.loads(run("show", GOOD.id, "--cache", url, "--json"))["artifacts"]
    assert sorted(one["uses"] for one in output)[0] == [] and "loop" in str(output)
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


def test_failed_removals_are_reported(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_all(url, GOOD, NEWER)

    def refuse(_store: object, _key: str) -> bool:
        raise StoreError("cache: read-only")

    monkeypatch.setattr(DirStore, "delete", refuse)
    output = run("gc", "--cache", url, "--yes", code=1)
    stays = f"{GOOD.id}: cache: read-only; this version stays"
    assert stays in output
    output = run("forget", GOOD.id, "--cache", url, "--json", code=1)
    assert stays in output and "forgetting" not in output
    assert json.loads(output.splitlines()[-1]) == {"version": 1, "forgotten": [], "damaged": 0}


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
def test_sync_options(url: str, tmp_path: Path, words: list[str], wanted: list[Record]) -> None:
    put_all(url, GOOD, SMALL, INFER)
    put_bytes(url, Name.of(INFER, b"rubbish").text, b"rubbish")
    other = f"dir:{tmp_path}/other"
    assert "1 refused" in run("sync", url, other, *words, code=1)
    assert stored_ids(other) == ids(*wanted)
    *_refused, document = run("sync", url, other, *words, "--json", code=1).splitlines()
    output = json.loads(document)["records"]
    assert sorted(one["outcome"] for one in output) == ["known"] * len(wanted) + ["refused"]


def test_show_says_which_store_has_a_record(url: str, tmp_path: Path) -> None:
    other = f"dir:{tmp_path}/other"
    put_all(url, GOOD)
    put_all(other, INFER)
    both = ("--cache", f"{url},{other}")
    listed = run("show", *both)
    assert "store" in listed.splitlines()[0]
    assert listed.endswith(f"store 1: {url}\nstore 2: {other}\n")
    numbers = {line.split("@")[0]: line.split()[-1] for line in listed.splitlines() if "@" in line}
    assert numbers == {GOOD.key.id: "1", INFER.key.id: "2"}
    for one, where in ((GOOD, url), (INFER, other)):
        assert f"  store           {where}\n" in run("show", one.id, *both)
    output = json.loads(run("show", *both, "--json"))["records"]
    assert {one["id"]: one["store"] for one in output} == {GOOD.id: url, INFER.id: other}
    assert "dir:" not in run("show", "--cache", url)
