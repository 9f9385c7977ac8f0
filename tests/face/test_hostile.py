"""Hostile content of a store is refused on its own, never run, and printed only as text."""

from __future__ import annotations

import contextlib
import io
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

import advisor as package
from advisor.cache.config import Config
from advisor.cache.record import Record, Target
from advisor.cache.stores import disk
from advisor.errors import RecordDamaged
from advisor.open_store import open_records
from advisor.report.progress import Shown
from advisor.tuners.search.journal import JournaledTrial
from advisor.tuners.search.ratio import LEVEL, Ratio
from tests import hostile
from tests.cache.examples import KEY, record, trial
from tests.face.commands import MODEL, SHAPE, advisor
from tests.face.unmeasured import fake_search

OTHER = hostile.OTHER.id
COMMANDS: dict[str, tuple[str, ...]] = {
    "apply": (),
    "show": ("show",),
    "show it": ("show", OTHER),
    "report": ("report", OTHER, "--html", "-"),
    "why": ("why", "model.py:Net", "--shape", SHAPE),
    "tune": ("tune", "model.py", "--shape", SHAPE, "--device", "cpu"),
    "verify": ("verify", OTHER, "--budget", "3s"),
    "gc": ("gc", "--yes"),
}


class CommandResult(NamedTuple):
    """Exit code (0 for a lookup), output and duration of a command."""

    code: int
    output: str
    seconds: float


def run_commands(case: hostile.Case, folder: Path) -> dict[str, CommandResult]:
    """Create the case's store in a folder with a model, and run every command on it.

    Tuning measures nothing: it is refused, or stores a made-up record. The store's URL is written
    to the file `url`.
    """
    (folder / "model.py").write_text(MODEL)
    url = case.make(folder)
    (folder / "url").write_text(url)
    results = {}
    with fake_search():
        for name, words in COMMANDS.items():
            began = time.monotonic()
            if words:
                done = advisor(folder, *words, "--cache", url)
                code, output = done.returncode, done.stdout + done.stderr
            else:
                code, output = 0, lookup_warnings(folder, url)
            results[name] = CommandResult(code, output, time.monotonic() - began)
    return results


def lookup_warnings(folder: Path, url: str) -> str:
    """Warnings of a lookup in a folder."""
    with contextlib.chdir(folder), warnings.catch_warnings(record=True, action="always") as caught:
        package.lookup(package.Model("model.py:Net", device="cpu"), shape=SHAPE, store=url)
    return "\n".join(str(one.message) for one in caught)


def record_is_lost(case: hostile.Case, folder: Path) -> bool:
    """Whether the honest record can no longer be read."""
    url = (folder / "url").read_text()
    return case.honest and record().id not in {one.id for one in open_records(url).all()}


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hostile.Case]:
    monkeypatch.setattr(disk, "_READ_TIMEOUT_S", 0.1)  # instead of 10 s for each command
    yield request.param
    while hostile.HELD:
        hostile.HELD.pop().close()


@pytest.mark.parametrize("case", hostile.CASES, ids=lambda case: case.name, indirect=True)
def test_hostile_content_harms_no_command(case: hostile.Case, here: Path) -> None:
    for command, one in run_commands(case, here).items():
        assert one.code in (0, 1, 2), (command, one)
        assert "Traceback" not in one.output, (command, one.output)
        assert all(char.isprintable() or char == "\n" for char in one.output), (command, one.output)
        assert command != "apply" or one.output.count("\n") <= 1
    assert not list(here.rglob("ran"))
    assert not record_is_lost(case, here)


ODD_NAMES = ("[bold]x.py", "[nope]x.py", "[link=file]x.py", "[red]a[on red].py", "a[ b].py")


def record_with_markup(name: str, **more: str) -> Record:
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


@pytest.mark.parametrize("name", ODD_NAMES)
def test_markup_in_a_record_is_printed_as_text(here: Path, name: str) -> None:
    (here / name).write_text(MODEL)
    one = record_with_markup(name)
    records = open_records(None)
    records.put(one)
    records.put(record())  # must stay readable
    outputs = {
        "show": advisor(here, "show"),
        "whole": advisor(here, "show", one.id),
        "why": advisor(here, "why", name, "--shape", "64x3x256x256"),
        "verify": advisor(here, "verify", one.id),
        "gc": advisor(here, "gc"),
        "export": advisor(here, "export", "some.pack"),
        "import": advisor(here, "import", "some.pack", "--cache", "dir:other"),
        "forget": advisor(here, "forget", one.id),
    }
    codes = {command: done.returncode for command, done in outputs.items()}
    assert codes == dict.fromkeys(outputs, 0) | {"verify": 2}
    for done in outputs.values():
        assert "\x1b" not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert outputs["show"].stdout.count("@64") == 2
    for command in ("show", "whole", "forget"):
        # A narrow column wraps a name, but shows all of it.
        flat = "".join(outputs[command].stdout.split())
        assert "".join(name.split()) in flat, outputs[command].stdout
    assert "[/stale]" in outputs["whole"].stdout and "[/H200]" in outputs["whole"].stdout
    assert "[/H200]" in outputs["why"].stdout


@pytest.mark.parametrize(
    "text", ["a\x1b[31m.py", "a\x9b31m.py", "a\rb.py", "a\nb.py", "a\u202eb.py"]
)
def test_control_characters_are_never_printed(here: Path, text: str) -> None:
    """In every field, such text is refused or turned into one printable line."""
    plain = record_with_markup("x.py")
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
    outputs = [listed]
    for one in json.loads(advisor(here, "show", "--json").stdout)["records"]:
        outputs.append(advisor(here, "show", one["id"]))
        outputs.append(advisor(here, "forget", one["id"]))
    for done in outputs:
        assert done.returncode == 0
        lines = (done.stdout + done.stderr).splitlines()
        assert all(line.isprintable() for line in lines) and text not in done.stdout


@pytest.mark.parametrize("odd", ["\x1b[2J", "\x9b2J", "\r", "\n", "\u202e"])
def test_a_warning_is_one_line_of_text(here: Path, odd: str) -> None:
    """The path that it names may contain any character."""
    with pytest.warns(package.AdvisorWarning) as caught:
        package.lookup(package.Model(f"a{odd}b.py:Net", device="cpu"))
    (message,) = [str(one.message) for one in caught]
    assert "there is no file" in message and message.isprintable()


def test_markup_in_a_notice_of_tune_is_printed_as_text() -> None:
    """For example in library names of a similar record. '[/bold]' alone makes rich raise."""
    out = io.StringIO()
    progress = Shown(Console(file=out, width=80), budget_s=1.0)
    progress.notice("tried first: of torchvision [/bold][link=https://example.com]0.26.0")
    assert out.getvalue().endswith("[/bold][link=https://example.com]0.26.0\n")


DEFAULT = record().baseline.config


def test_tune_prints_one_line_for_each_trial() -> None:
    out = io.StringIO()
    compiled = DEFAULT.replace(compile="default")
    progress = Shown(Console(file=out, width=200), budget_s=90.0)
    for ratio, visited in (
        (Ratio(mean=1.5, low=1.4, high=1.6), trial(1, compiled)),
        (LEVEL, trial(3, outcome="failed")),
    ):
        progress.visited(JournaledTrial(visited, ratio, None), "compile=default", compiled, 60.0)
    first, second = out.getvalue().splitlines()
    assert first.startswith("trial 1:  compile=default  ")
    assert "1.50x  (1.40-1.60)  the best so far  1m 00s left of 1m 30s" in first
    assert "failed  said so  " in second
