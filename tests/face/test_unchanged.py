"""A tuned command is not started again unless something that it may depend on has changed."""

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
    """The stored record of the command. Starting the command would create a file."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("open('started', 'w')")
    Path("model.py").write_text("width = 8")
    Path("conf.json").write_text("{}")
    task = dataclasses.replace(TASK, command=COMMAND)
    key = dataclasses.replace(KEY, environment=detect("cpu"), task=task, threads=own_threads())
    made = record(key)
    open_records(None).put(made)
    call_of().remember(made)
    return made


def call_of(**changes: object) -> CommandCall:
    plan = Plan.of({name: value for name, value in changes.items() if name != "precisions"})
    permitted = permissions({"precisions": changes.get("precisions")})
    return CommandCall(open_records(None), COMMAND, permitted, plan)


def test_a_tuned_command_is_not_started_again(made: Record) -> None:
    assert call_of().known() == call_of(budget="3s").known() == made
    again = advisor(Path.cwd(), "tune", "--", *COMMAND)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("Already tuned, ") and made.id in again.stdout
    assert not Path("started").exists()


def edit(name: str) -> Callable[[], object]:
    return lambda: Path(name).write_text("something else")


CHANGES: dict[str, Callable[[], object]] = {
    "script": edit("train.py"),
    "module": edit("model.py"),
    "named file": edit("conf.json"),
    "new file": edit("new.yaml"),
    "variable": lambda: os.environ.__setitem__("WIDTH", "16"),
    "folder": lambda: os.chdir(".."),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_file_variable_or_folder_makes_the_record_unknown(
    made: Record, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "8")
    call_of().remember(made)
    assert call_of().known() == made
    change()
    assert call_of().known() is None


def test_a_call_during_which_something_changed_is_not_remembered(
    made: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDTH", "8")
    earlier = call_of()
    monkeypatch.setenv("WIDTH", "16")
    earlier.remember(made)
    monkeypatch.setenv("WIDTH", "8")
    assert call_of().known() is None


def test_other_options_and_a_stale_record_need_a_new_tuning(made: Record) -> None:
    larger = f"{made.provenance.budget_s + 1:g}s"
    for other in ({"effort": "exhaustive"}, {"steps": 500}, {"precisions": "default"}):
        assert call_of(**other).known() is None
    assert call_of(budget=larger).known() is None
    changes = {"stale": "slower", "revised": made.provenance.created + 1}
    open_records(None).put(dataclasses.replace(made, **changes))  # type: ignore[arg-type]
    assert call_of().known() is None


def test_a_record_of_a_smaller_budget_is_not_enough_by_default(made: Record) -> None:
    brief = dataclasses.replace(made.provenance, budget_s=5.0, seconds=5.0)
    again = dataclasses.replace(made, provenance=brief, revised=made.provenance.created + 1)
    open_records(None).put(again)
    call_of().remember(again)
    assert call_of().known() is None and call_of(budget="5s").known() == again
