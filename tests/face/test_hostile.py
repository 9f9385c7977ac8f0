"""The corpus of tests/hostile.py through every command and apply(): refused alone, never run."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from advisor.cache.config import Config
from advisor.cache.stores import disk
from advisor.report.progress import Shown
from tests import hostile
from tests.cache.examples import trial
from tests.face.through import COMMANDS, lost, through

FINE = (0, 1, 2)


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[hostile.Case]:
    monkeypatch.setattr(disk, "_BUSY_S", 0.1)  # of ten, which each command would wait
    yield request.param
    while hostile.HELD:
        hostile.HELD.pop().close()


@pytest.mark.parametrize("case", hostile.CASES, ids=lambda case: case.name, indirect=True)
def test_hostile(case: hostile.Case, tmp_path: Path) -> None:
    happened = through(case, tmp_path)
    assert set(happened) == set(COMMANDS)
    for command, one in happened.items():
        assert one.code in FINE, (command, one)
        assert "Traceback" not in one.said, (command, one.said)
        assert all(char.isprintable() or char == "\n" for char in one.said), (command, one.said)
        assert one.seconds < 30, command  # not for ever; on a busy host too
    assert not list(tmp_path.rglob("ran"))
    assert happened["apply"].said.count("\n") <= 1
    assert not lost(case, tmp_path)


def test_what_tune_says_of_a_record_is_no_markup() -> None:
    """As the libraries of one that is akin: '[/bold]' alone would end the command."""
    said = io.StringIO()
    with Shown(Console(file=said, width=80), budget_s=1.0) as progress:
        progress.notice("tried first: of torchvision [/bold][link=https://example.com]0.26.0")
    assert said.getvalue().endswith("[/bold][link=https://example.com]0.26.0\n")


def test_a_trial_that_failed_says_why() -> None:
    said = io.StringIO()
    with Shown(Console(file=said, width=80), budget_s=1.0) as progress:
        progress.tried(trial(3, outcome="failed"), 0.5)
    assert "failed  said so  " in said.getvalue()


def test_what_is_compiled_is_told_when_it_changes() -> None:
    said = io.StringIO()
    compiled = Config(compile="default", batch_size=4)
    with Shown(Console(file=said, width=200), budget_s=1.0) as progress:
        for at in (0.0, 1.0, 2.2):
            progress.building([compiled, compiled.replace(precision="bf16")], at)
        progress.building([compiled], 23.4)
    assert said.getvalue().splitlines() == [
        "compiling 2 configs at once: compile=default; compile=default, bf16",
        "compiling: compile=default ... 23 s",
    ]
