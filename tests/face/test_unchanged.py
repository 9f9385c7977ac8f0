"""A command that is tuned is not started again, unless what it may depend on has changed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.cache.record import Record
from advisor.cache.task import permissions
from advisor.open_store import open_records
from advisor.tuners.environment import detect, own_threads
from advisor.tuners.search.plan import Plan
from advisor.unchanged import CommandCall
from tests.cache.examples import KEY, TASK, record
from tests.face.commands import advisor

COMMAND = ("python", "train.py", "--config=conf.json")


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """What the command gave: it was tuned here, and is not started, as it would leave a file."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('started', 'w')")
    Path("model.py").write_text("width = 8")
    Path("conf.json").write_text("{}")
    task = dataclasses.replace(TASK, command=COMMAND)
    key = dataclasses.replace(KEY, environment=detect("cpu"), task=task, threads=own_threads())
    made = record(key)
    open_records(None).put(made)
    asked().remember(made)
    return made


def asked(**changes: object) -> CommandCall:
    plan = Plan.of({name: value for name, value in changes.items() if name != "precisions"})
    permitted = permissions({"precisions": changes.get("precisions")})
    return CommandCall(open_records(None), COMMAND, permitted, plan)


def test_it_is_not_started(made: Record) -> None:
    assert asked().known() == asked(budget="3s").known() == made
    again = advisor(Path.cwd(), "tune", "--", *COMMAND)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("Already tuned, ") and made.id in again.stdout
    assert not Path("started").exists()


def edited(name: str) -> Callable[[], object]:
    return lambda: Path(name).write_text("something else")


CHANGES: dict[str, Callable[[], object]] = {
    "script": edited("train.py"),
    "module": edited("model.py"),
    "named file": edited("conf.json"),
    "new file": edited("new.yaml"),
    "variable": lambda: os.environ.__setitem__("WIDTH", "16"),
    "folder": lambda: os.chdir(".."),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_where_something_has_changed(
    made: Record, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "8")
    asked().remember(made)
    assert asked().known() == made
    change()
    assert asked().known() is None


def test_a_call_during_which_something_changed_is_not_remembered(
    made: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "8")
    begun = asked()
    monkeypatch.setenv("WIDTH", "16")
    begun.remember(made)
    monkeypatch.setenv("WIDTH", "8")
    assert asked().known() is None


def test_what_was_asked_otherwise_is_measured(made: Record) -> None:
    larger = f"{made.provenance.budget_s + 1:g}s"
    for other in ({"effort": "exhaustive"}, {"steps": 500}, {"precisions": "default"}):
        assert asked(**other).known() is None
    assert asked(budget=larger).known() is None
    changes = {"stale": "slower", "revised": made.provenance.created + 1}
    open_records(None).put(dataclasses.replace(made, **changes))  # type: ignore[arg-type]
    assert asked().known() is None


def test_a_smaller_budget_is_not_the_default_one(made: Record) -> None:
    brief = dataclasses.replace(made.provenance, budget_s=5.0, seconds=5.0)
    again = dataclasses.replace(made, provenance=brief, revised=made.provenance.created + 1)
    open_records(None).put(again)
    asked().remember(again)
    assert asked().known() is None and asked(budget="5s").known() == again
