"""Nothing that a record says reaches a terminal as anything but text."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

import advisor as package
from advisor.cache.config import Config
from advisor.cache.record import Record, Target
from advisor.errors import RecordDamaged
from advisor.open_store import open_records
from tests.cache.examples import KEY, choice, record
from tests.face.commands import MODEL, advisor

ODD = ("[bold]x.py", "[nope]x.py", "[link=file]x.py", "[red]a[on red].py", "a[ b].py")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(name: str, **more: str) -> Record:
    task = replace(KEY.task, target=name, model_args=Config(a="[/b]"))
    device = replace(KEY.environment.device, name=more.get("device", "[/H200]"))
    environment = replace(KEY.environment, device=device)
    made = record(replace(KEY, task=task, environment=environment))
    return replace(
        made,
        target=Target(name=f"{name}:Net", origin="0" * 16),
        stale=more.get("stale", "[/stale]"),
        provenance=replace(made.provenance, host_cpu="[/cpu]"),
    )


@pytest.mark.parametrize("name", ODD)
def test_markup_is_text(here: Path, name: str) -> None:
    (here / name).write_text(MODEL)
    one = named(name)
    records = open_records(None)
    records.put(one)
    told = {
        "show": advisor(here, "show"),
        "whole": advisor(here, "show", one.id),
        "why": advisor(here, "why", name, "--shape", "64x3x256x256"),
        "verify": advisor(here, "verify", one.id),
        "gc": advisor(here, "gc"),
        "export": advisor(here, "export", "some.pack"),
        "import": advisor(here, "import", "some.pack", "--cache", "dir:other"),
        "forget": advisor(here, "forget", one.id),
    }
    codes = {command: done.returncode for command, done in told.items()}
    assert codes == dict.fromkeys(told, 0) | {"verify": 2}
    for done in told.values():
        assert "\x1b" not in done.stdout + done.stderr and "Traceback" not in done.stderr
    for command in ("show", "whole", "forget"):
        # A narrow column folds a name, and loses nothing of it.
        flat = "".join(told[command].stdout.split())
        assert "".join(name.split()) in flat, told[command].stdout
    assert "[/stale]" in told["whole"].stdout and "[/H200]" in told["whole"].stdout
    assert "[/H200]" in told["why"].stdout


@pytest.mark.parametrize(
    "text", ["a\x1b[31m.py", "a\x9b31m.py", "a\rb.py", "a\nb.py", "a\u202eb.py"]
)
def test_what_a_terminal_obeys_is_never_shown(here: Path, text: str) -> None:
    """Whoever writes it: what is no line of text is refused or made one, whatever the field."""
    plain = named("x.py")
    device = replace(KEY.environment.device, name=text)
    environment = replace(KEY.environment, device=device)
    odd = (
        replace(plain, target=Target(name=text, origin="")),
        replace(plain, key=replace(plain.key, environment=environment)),
        replace(plain, stale=text),
        replace(plain, provenance=replace(plain.provenance, host_cpu=text)),
    )
    records = open_records(None)
    for one in odd:
        with contextlib.suppress(RecordDamaged):
            records.put(one)
    listed = advisor(here, "show")
    said = [listed]
    for one in json.loads(advisor(here, "show", "--json").stdout)["records"]:
        said.append(advisor(here, "show", one["id"]))
        said.append(advisor(here, "forget", one["id"]))
    for done in said:
        assert done.returncode == 0
        lines = (done.stdout + done.stderr).splitlines()
        assert all(line.isprintable() for line in lines) and text not in done.stdout


@pytest.mark.parametrize("odd", ["\x1b[2J", "\x9b2J", "\r", "\n", "\u202e"])
def test_a_warning_is_one_line_of_text(here: Path, odd: str) -> None:
    """Whatever the path that it names: a file's name may hold all of it."""
    with pytest.warns(package.AdvisorWarning) as seen:
        package.lookup(package.Model(f"a{odd}b.py:Net", device="cpu"))
    (said,) = [str(one.message) for one in seen]
    assert "there is no file" in said and said.isprintable()


def test_a_listing_is_not_spoilt_by_one(here: Path) -> None:
    records = open_records(None)
    for number, name in enumerate(ODD):
        records.put(named(name, device=f"device {number}"))
    records.put(replace(record(), winners=tuple(
        replace(one, choice=choice(rate=3000.0, speedup=1.5)) for one in record().winners
    )))  # fmt: skip
    shown = advisor(here, "show")
    assert shown.returncode == 0 and shown.stderr == ""
    assert record().id in shown.stdout
    assert shown.stdout.count("@64") == len(ODD) + 1
