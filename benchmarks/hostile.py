"""Hostile records and stores through every command and apply(): what happened, as a table.

    python benchmarks/hostile.py > benchmarks/results/hostile.md

The cases are those of tests/hostile.py. Each row is one store with an honest record and something
hostile beside it; each cell the exit code, the seconds, and what was said of it first.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
from tests import hostile
from tests.face.test_hostile import COMMANDS, Happened, lost, through


def main() -> None:
    heads = [*COMMANDS, "code run", "lost"]
    print("| case |", " | ".join(heads), "|")
    print("|---|" + "---|" * len(heads))
    for case in hostile.CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            os.environ["XDG_DATA_HOME"] = str(folder / "data")
            cells = [_cell(one) for one in through(case, folder).values()]
            cells.append("yes" if list(folder.rglob("ran")) else "no")
            while hostile.HELD:
                hostile.HELD.pop().close()
            cells.append("yes" if lost(case, folder) else "no")
        print(f"| {case.name} |", " | ".join(cells), "|", flush=True)


def _cell(one: Happened) -> str:
    traced = ", traceback" if "Traceback" in one.said else ""
    return f"{one.code}{traced}, {one.seconds:.1f} s"


if __name__ == "__main__":
    main()
