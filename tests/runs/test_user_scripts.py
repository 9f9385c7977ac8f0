"""`advisor tune` on scripts as users write them, a few seconds: what holds on any machine."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from tests.face.commands import advisor, own
from tests.runs.test_scripts import FOLDER

BUDGET_S, START_S = 3, 60
VERDICTS = (
    "Start it like this:",
    "Nothing measured clearly gains on this machine; run it as usual.",
    "Could not tell what gains on this machine; run it as usual.",
    "Not tuned yet: ",
)
TOO_BUSY = r"could not be measured: give a larger --budget|too small .* give at least \d+s"
LONG = ("gan", "lengths", "keywords", "teacher_student")


@pytest.mark.parametrize(
    "name",
    ["evaluation", "own_autocast", *(pytest.param(one, marks=pytest.mark.long) for one in LONG)],
)
def test_it_is_tuned_in_time_and_told_one_thing(name: str, tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()
    for checkpoint in ("last.pt", "last.whole"):
        (work / checkpoint).write_bytes(b"of a run before")
    source = (FOLDER / f"{name}.py").read_text().replace("break", "continue")
    (work / "train.py").write_text(re.sub(r"in range\(\d\):", "in range(10**9):", source))
    before = contents(work)
    command = ("python", "train.py", "last.pt")

    began = time.monotonic()
    options = ("--effort", "quick", "--budget", f"{BUDGET_S}s")
    done = advisor(work, "tune", *options, "--", *command, **own(tmp_path))
    assert time.monotonic() - began < 1.1 * BUDGET_S + START_S
    assert contents(work) == before
    assert "hangs" not in done.stdout + done.stderr
    if done.returncode:  # a host so busy that not even the script itself was measured
        assert re.search(TOO_BUSY, done.stderr), done.stderr
        return

    lines = done.stdout.splitlines()
    (verdict,) = (line for line in lines if line.startswith(VERDICTS))
    advises = verdict == VERDICTS[0]
    started = f"    advisor run -- {shlex.join(command)}"
    assert (lines[-1] == started) == advises == any("at your batch  " in one for one in lines)
    remedies = re.findall(r"--force|--budget \w+", done.stdout)
    assert len(set(remedies)) == len(remedies) <= 2, done.stdout
    if not verdict.startswith(VERDICTS[3]):
        why = advisor(work, "why", "--", *command, **own(tmp_path)).stdout
        assert (": unmodified" in why) != advises, why


def contents(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, by its path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if "__pycache__" not in path.parts
    }
