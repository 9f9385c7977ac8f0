"""A new field or knob takes one row. Tested on a copy of the sources with such rows."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import advisor
from advisor.cache.task import Task, rows
from advisor.tuners.search.plan import Plan
from tests.face.commands import MODEL, SHAPE

ROOT = Path(__file__).parents[2]

FIELD = """
    flavour: str = row(
        kinds.SingleChoice(("plain", "sour")), "A made-up field.", "plain", added=True
    )
"""
KNOB = """    Knob(
        name="slack",
        summary="how much of a made-up sleep is left out",
        domain=range(10),
        default=0,
        values=lambda here: (0, 9),
        flag=Flag(
            set=lambda value: os.environ.__setitem__("SLACK", str(value)),
            now=lambda: int(os.environ["SLACK"]),
        ),
    ),
"""
COMMAND = """
import sys
from pathlib import Path
from tests.face.commands import advisor
from tests.face.unmeasured import fake_worker

with fake_worker({("slack", 9): 1.4}):
    done = advisor(Path.cwd(), *sys.argv[1:])
print(done.stdout, end="")
sys.exit(done.stderr if done.returncode else 0)
"""
"""Runs an advisor command. The new knob makes the model 1.4 times as fast."""


ROWS = (
    ("cache/task.py", "\n    @classmethod\n    def of(", FIELD),
    ("advisor/arguments.py", "    vocab: int | None = None\n", "    flavour: str | None = None\n"),
    ("tuners/knobs.py", "    Knob(\n        name=THREADS,", KNOB),
)
"""(File, the text that the row is inserted before, the row)."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run code and return its output. It imports a copy of the sources with these rows, not the
    installed package."""
    sources, work = tmp_path_factory.mktemp("src"), tmp_path_factory.mktemp("work")
    for name in ("advisor", "tuners", "cache"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True)
    for name, before, row in ROWS:
        source = (sources / name).read_text()
        assert before in source
        (sources / name).write_text(source.replace(before, row + before))
    (work / "model.py").write_text(MODEL)
    path = f"{sources}{os.pathsep}{ROOT}"  # ROOT has the modules of the tests
    env = os.environ | {"PYTHONPATH": path, "SLACK": "0"}

    def run(code: str, *words: str) -> str:
        command = [sys.executable, "-W", "always", "-c", code, *words]
        ran = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


def keywords(cls: Any, **more: object) -> set[str]:
    """Keywords of a Task or a Plan that a public class of arguments can set."""
    names = {one.name for one in dataclasses.fields(cls)}
    return {*cls(**dict.fromkeys(names, "some") | more).given}


def test_every_row_has_a_public_argument() -> None:
    every = {row.keyword for row in rows(Task).values() if row.option or row.switches}
    assert keywords(advisor.Model) | keywords(advisor.Permit) == every - {"shape"}
    planned = keywords(advisor.Budget) | keywords(advisor.Budget, length=3)
    assert planned == {row.keyword for row in rows(Plan).values()}
    applied = dict(inspect.signature(advisor.apply).parameters)
    assert len(applied) <= 10
    del applied["tune"]  # lookup() has no run to tune
    assert applied == dict(inspect.signature(advisor.lookup).parameters)


@pytest.mark.long
def test_a_new_field_is_an_option_and_part_of_the_key(python: Callable[..., str]) -> None:
    advisor = functools.partial(python, COMMAND)
    assert "--flavour [plain|sour]" in advisor("tune", "--help")
    assert "--flavour [plain|sour]" in advisor("why", "--help")

    tune = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu", "--json")
    quick = ("--budget", "6s", "--fixed-batch", "--no-compile", "--no-verify")
    sour = json.loads(advisor(*tune, *quick, "--flavour", "sour"))
    plain = json.loads(advisor(*tune, *quick))
    assert (plain["status"], sour["status"]) == ("tuned", "tuned")
    assert plain["record"]["id"] != sour["record"]["id"]
    again = json.loads(advisor(*tune, *quick, "--flavour", "sour"))
    assert (again["status"], again["record"]["id"]) == ("known", sour["record"]["id"])

    line = sour["record"]["script"]
    assert 'flavour="sour"' in line and "flavour" not in plain["record"]["script"]
    output = python(
        f"import sys, advisor\n{line}\nprint(advice.record.id)\n"
        "print(advisor.lookup('model.py:Net', shape='4x3x8x8').record.id)\n"
        "sys.stderr = sys.stdout\n"
        "advisor.lookup(advisor.Model('model.py:Net', flavour='sour'), shape='4x3x9x9')"
    )
    assert output.split()[:2] == [sour["record"]["id"], plain["record"]["id"]]
    assert "--flavour sour" in output
    why = advisor("why", "model.py", "--shape", SHAPE, "--flavour", "sour")
    assert "flavour plain -> sour" in why


@pytest.mark.long
def test_a_new_knob_is_tuned_shown_and_applied(python: Callable[..., str]) -> None:
    """Its values are integers from 0 on, as 0 is easily mistaken for a missing value."""
    advisor = functools.partial(python, COMMAND)
    tune = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu", "--json")
    options = ("--budget", "16s", "--fixed-batch", "--no-compile")
    options += ("--precisions", "default")
    record = json.loads(advisor(*tune, *options))["record"]
    chosen = {one["use"]: one["choice"]["config"]["slack"] for one in record["winners"]}
    assert chosen == {"flags": 9, "pilot": 9, "loop": 9, "capture": 9}
    assert record["baseline"]["config"]["slack"] == 0

    assert "slack=9" in advisor("explain", record["id"], "--budget", "8s")
    assert "slack=9" in advisor("show", record["id"])
    served = python(
        "import os, advisor\n"
        f"{record['script']}\n"
        "print(os.environ['SLACK'], advice.config.slack)\n"
        "missed = advisor.apply('model.py:Net', shape='4x3x9x9')\n"
        "print(missed.config.slack)"
    )
    assert served.split() == ["9", "9", "0"]
