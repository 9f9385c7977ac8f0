"""The corpus of tests/hostile.py through every command and apply(): refused alone, never run."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from advisor.cache.config import Config
from advisor.cache.record import Trial
from advisor.cache.stores import disk
from advisor.report import progress as progress_of
from advisor.report.progress import Shown
from advisor.tuners.search.ratio import LEVEL, Ratio
from advisor.tuners.search.space import Space
from advisor.tuners.search.visit import BUILDING, MEASURING
from tests import hostile
from tests.cache.examples import record, trial
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
    progress = Shown(Console(file=said, width=80), budget_s=1.0)
    progress.notice("tried first: of torchvision [/bold][link=https://example.com]0.26.0")
    assert said.getvalue().endswith("[/bold][link=https://example.com]0.26.0\n")


DEFAULT = record().baseline.config


def shown(progress: Shown, visited: Trial, ratio: Ratio = LEVEL, best: Config = DEFAULT) -> None:
    progress.visited(visited, ratio, None, best, 60.0)


def test_a_trial_that_failed_says_why() -> None:
    said = io.StringIO()
    progress = Shown(Console(file=said, width=80), budget_s=1.0)
    shown(progress, trial(3, outcome="failed"))
    assert "failed  said so  " in said.getvalue()


def test_what_is_compiled_is_told_and_what_is_measured_is_not() -> None:
    said = io.StringIO()
    compiled = DEFAULT.replace(compile="default")
    progress = Shown(Console(file=said, width=200), budget_s=90.0)
    space = Space({name: (value,) for name, value in DEFAULT.items()})
    facts = SimpleNamespace(name="model.py", parameters=1)
    progress.started(facts, record().key, space, 0)  # type: ignore[arg-type]
    progress.doing(compiled.at(7), BUILDING, None, 80.0)
    progress.doing(compiled, MEASURING, None, 60.0)
    shown(progress, trial(1, compiled), Ratio(mean=1.5, low=1.4, high=1.6), compiled)
    *_started, first, second = said.getvalue().splitlines()
    assert "compile=default at batch 7" in first
    assert first.startswith("compiling: ") and first.endswith(" left of 1m 30s")
    assert "compile=default" in first and second.startswith("trial 1:")
    assert "1.50x  (1.40-1.60)  the best so far  1m 00s left of 1m 30s" in second


def test_a_dataset_that_is_long_in_the_making_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_of, "SILENT_S", 0.05)
    said = io.StringIO()
    progress = Shown(Console(file=said, width=200), budget_s=20.0)
    with progress.making("data.py:make", 60.0):
        deadline = time.monotonic() + 20.0
        while not said.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    told = said.getvalue()
    assert "data 'data.py:make': making its dataset" in told and "gives up after 1m 00s" in told
    with progress.making("data.py:make", 60.0):
        pass
    assert said.getvalue() == told
