"""Scripts as people write them, tuned for seconds: what holds on any machine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.face.commands import advisor, own
from tests.runs.test_scripts import FOLDER

SCRIPTS = Path(__file__).parents[1] / "user_scripts"
MINE = b"of a run before"
TUNED = {
    "trainer": ("--samples 80 --batch-size 4 --epochs 999", "checkpoints/last.pt"),
    "autocast_workers": (
        "--pictures 80 --batch-size 4 --width 4 --workers 1 --epochs 999",
        "resnet.pt",
    ),
}
"""The arguments of each, so that steps take milliseconds, and a checkpoint that it would write."""
BUDGET_S, START_S = 3, 60
VERDICTS = (
    "Start it like this:",
    "Nothing measured clearly gains on this machine; run it as usual.",
    "Could not tell what gains on this machine; run it as usual.",
    "Not tuned yet: ",
)
TOO_BUSY = r"could not be measured: give a larger --budget|too small .* give at least \d+s"


ENDLESS = ("gan", "lengths", "accumulation", "teacher_student")
"""Scripts of tests/runs/scripts: two models by turns, batches of many shapes, a teacher."""


@pytest.mark.parametrize(
    "name", [*TUNED, *(pytest.param(one, marks=pytest.mark.long) for one in ENDLESS)]
)
def test_it_is_tuned_in_time_and_told_one_thing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    work = tmp_path / "work"
    words, checkpoint = TUNED.get(name, ("last.pt", "last.pt"))
    (work / checkpoint).parent.mkdir(parents=True)
    (work / checkpoint).write_bytes(MINE)
    if name in TUNED:
        shutil.copy(SCRIPTS / f"{name}.py", work)
    else:
        source = (FOLDER / f"{name}.py").read_text()
        (work / f"{name}.py").write_text(re.sub(r"in range\(\d\):", "in range(10**9):", source))
    before = contents(work)
    command = ("python", f"{name}.py", *words.split())
    options = ("--effort", "quick", "--budget", f"{BUDGET_S}s")

    began = time.monotonic()
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
