"""Runs every command and apply() on hostile records and stores, and prints a table.

    python benchmarks/hostile.py > benchmarks/results/hostile.md

The cases are those of tests/hostile.py. Each row is a store with an honest record and something
hostile. Each cell has the exit code, whether there was a traceback, and the seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
from tests import hostile
from tests.face.test_hostile import COMMANDS, CommandResult, record_is_lost, run_commands


def main() -> None:
    headings = [*COMMANDS, "code run", "lost"]
    print("| case |", " | ".join(headings), "|")
    print("|---|" + "---|" * len(headings))
    for case in hostile.CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            os.environ["XDG_DATA_HOME"] = str(folder / "data")
            cells = [_cell(outcome) for outcome in run_commands(case, folder).values()]
            cells.append("yes" if list(folder.rglob("ran")) else "no")
            while hostile.HELD:
                hostile.HELD.pop().close()
            cells.append("yes" if record_is_lost(case, folder) else "no")
        print(f"| {case.name} |", " | ".join(cells), "|", flush=True)


def _cell(outcome: CommandResult) -> str:
    traced = ", traceback" if "Traceback" in outcome.output else ""
    return f"{outcome.code}{traced}, {outcome.seconds:.1f} s"


if __name__ == "__main__":
    main()
