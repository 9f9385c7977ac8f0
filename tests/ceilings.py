"""Fails if a folder has more lines than its ceiling; prints what the last change added.

    python tests/ceilings.py

Part of `make lint`. What a change adds should replace something. A ceiling is raised in a commit of
its own that says what for, and lowered whenever a folder has become smaller.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = {"tuners": 17_388, "cache": 5_119, "advisor": 14_294, "tests": 30_260}
"""Lines of Python. The aims are 14,000, 5,000, 11,000 and 24,000."""


def main() -> int:
    lines = {folder: lines_of(ROOT / folder) for folder in CEILINGS}
    added = last_change()
    for folder, ceiling in CEILINGS.items():
        over = "  OVER" if lines[folder] > ceiling else ""
        print(f"{folder:8}{lines[folder]:7,} of {ceiling:6,} lines  {added[folder]:+6,}{over}")
    return int(any(lines[folder] > ceiling for folder, ceiling in CEILINGS.items()))


def lines_of(folder: Path) -> int:
    """Counts the lines of Python in a folder, without links to other folders."""
    files = [one for one in folder.rglob("*.py") if not any(p.is_symlink() for p in one.parents)]
    return sum(len(one.read_text().splitlines()) for one in files)


def last_change() -> Counter[str]:
    """Returns the lines that each folder gained since the last commit, or in it if none changed."""
    changes = numstat("HEAD") or numstat("HEAD~1", "HEAD")
    gained: Counter[str] = Counter()
    for added, removed, path in (line.split("\t") for line in changes):
        if path.endswith(".py"):
            gained[path.partition("/")[0]] += int(added) - int(removed)
    return gained


def numstat(*commits: str) -> list[str]:
    """Returns git's lines 'added removed path', or none outside a repository."""
    words = ["git", "diff", "--numstat", "--no-renames", *commits, "--", "*.py"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return done.stdout.decode().splitlines() if done.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
