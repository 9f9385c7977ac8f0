"""What is added as one row is found everywhere: in a copy of the sources that has one row more."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import advisor
from advisor.cache.task import Task, rows
from advisor.tuners.search.plan import Plan
from tests.face.commands import MODEL, SHAPE

ROOT = Path(__file__).parents[2]

FIELD = """
    flavour: str = row(kinds.Choice(("plain", "sour")), "A made-up field.", "plain")
"""
KNOB = """    Knob(
        name="slack",
        summary="how much of a made-up sleep is left out",
        domain=Domain(most=9, least=0),
        default=0,
        values=lambda here: (0, 9),
        needs=lambda value: FLAGS,
        flag=Flag(
            set=lambda value: os.environ.__setitem__("SLACK", str(value)),
            now=lambda: int(os.environ["SLACK"]),
        ),
    ),
"""
SLEEPY = MODEL.replace("import torch\n", "import os, time, torch\n").replace(
    "    def forward(self, x):\n",
    "    def forward(self, x):\n        time.sleep(0.01 - 0.001 * int(os.environ['SLACK']))\n",
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources, as they lie in the checkout."""
    for folder in ("advisor", "tuners", "cache"):
        shutil.copytree(ROOT / folder, tmp_path / "src" / folder, symlinks=True)
    (tmp_path / "work").mkdir()
    return tmp_path


def insert(file: Path, before: str, text: str) -> None:
    source = file.read_text()
    assert before in source
    file.write_text(source.replace(before, text + before))


def run(copy: Path, *words: str) -> str:
    """What a command prints, with the copy in place of the installed package."""
    ran = subprocess.run(
        [sys.executable, *words],
        cwd=copy / "work",
        env=os.environ | {"PYTHONPATH": str(copy / "src"), "SLACK": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_public_signatures_have_every_row() -> None:
    asked = {row.keyword for row in rows(Task).values() if row.asked}
    planned = {row.keyword for row in rows(Plan).values()}
    every = {row.keyword for row in rows(Task).values() if row.given}
    assert every | planned <= set(inspect.signature(advisor.tune).parameters)
    for function in (advisor.apply, advisor.lookup):
        assert asked <= set(inspect.signature(function).parameters)
    applied = dict(inspect.signature(advisor.apply).parameters)
    del applied["tune"]  # which a lookup has no run for
    assert applied == dict(inspect.signature(advisor.lookup).parameters)


def test_a_field_of_the_task(copy: Path) -> None:
    sources = copy / "src"
    insert(sources / "cache/task.py", "\n    @classmethod\n    def of(", FIELD)
    for file in ("advisor/tuning.py", "advisor/finding/lookups.py"):
        insert(
            sources / file, "    vocab: int | None = None,\n", "    flavour: str | None = None,\n"
        )
    (copy / "work" / "model.py").write_text(MODEL)
    assert "--flavour [plain|sour]" in run(copy, "-m", "advisor", "tune", "--help")
    assert "--flavour [plain|sour]" in run(copy, "-m", "advisor", "why", "--help")

    tune = ("-m", "advisor", "tune", "model.py", "--shape", SHAPE, "--device", "cpu")
    quick = ("--budget", "8s", "--trials", "2", "--fixed-batch", "--no-compile", "--no-verify")
    plain = json.loads(run(copy, *tune, *quick, "--json"))
    sour = json.loads(run(copy, *tune, *quick, "--flavour", "sour", "--json"))
    assert (plain["status"], sour["status"]) == ("tuned", "tuned")
    assert plain["record"]["id"] != sour["record"]["id"]
    again = json.loads(run(copy, *tune, *quick, "--flavour", "sour", "--json"))
    assert (again["status"], again["record"]["id"]) == ("known", sour["record"]["id"])

    line = sour["record"]["script"]
    assert 'flavour="sour"' in line and "flavour" not in plain["record"]["script"]
    told = run(
        copy,
        *("-W", "always", "-c"),
        f"import sys, advisor\n{line}\nprint(advice.record.id)\n"
        "print(advisor.lookup('model.py:Net', shape='4x3x8x8').record.id)\n"
        "sys.stderr = sys.stdout\n"
        "advisor.lookup('model.py:Net', shape='4x3x9x9', flavour='sour')",
    )
    assert told.split()[:2] == [sour["record"]["id"], plain["record"]["id"]]
    assert "--flavour sour" in told
    why = run(copy, "-m", "advisor", "why", "model.py", "--shape", SHAPE, "--flavour", "sour")
    assert "flavour plain -> sour" in why


def test_a_knob(copy: Path) -> None:
    """Of whole numbers from 0 on, which is what is read, by a mistake, as nothing at all."""
    knobs = copy / "src" / "tuners" / "knobs.py"
    insert(knobs, '    Knob(\n        name="threads",', KNOB)
    (copy / "work" / "model.py").write_text(SLEEPY)
    tune = ("-m", "advisor", "tune", "model.py", "--shape", SHAPE, "--device", "cpu")
    options = ("--budget", "20s", "--fixed-batch", "--no-compile", "--precisions", "default")
    found = json.loads(run(copy, *tune, *options, "--json"))["record"]
    chosen = {one["use"]: one["choice"]["config"]["slack"] for one in found["winners"]}
    assert chosen == {"flags": 9, "pilot": 9, "loop": 9, "capture": 9}
    assert found["baseline"]["config"]["slack"] == 0

    explained = run(copy, "-m", "advisor", "explain", found["id"], "--budget", "10s")
    assert "slack=9" in explained
    shown = run(copy, "-m", "advisor", "show", found["id"])
    assert "slack=9" in shown
    served = run(
        copy,
        "-c",
        "import os, advisor\n"
        f"{found['script']}\n"
        "print(os.environ['SLACK'], advice.config.slack)\n"
        "missed = advisor.apply('model.py:Net', shape='4x3x9x9')\n"
        "print(missed.config.slack)",
    )
    assert served.split() == ["9", "9", "0"]
