"""A sample of mutants, each held against the tests that reach it; `make mutants` runs this.

It runs in a copy of the tree in which advisor/cache and advisor/tuners are folders and no links:
mutmut names a module by its path. Of the whole run tests/mutants.md tells.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import subprocess
import sys
from pathlib import Path

MUTMUT = Path(sys.executable).with_name("mutmut")
ANY = "advisor.tuners.knobs.x_plain__mutmut_1"
"""Running one makes them all, and finds which tests reach which function: of this one, few."""
OTHERS = ("torch", "optuna", "numpy", "msgpack", "rich", "click", "hypothesis", "diskcache")
"""Slow to import, and the same for every mutant."""
ALIVE = ("survived", "no tests", "not checked")
SET_UP = """
from mutmut.mutation import trampoline

# Each mutated function is called through one: where a warning points to, it is advisor's own.
vars(trampoline)["__name__"] = "advisor.trampoline"
# A process that a test starts runs the mutant too, and not what is installed.
os.environ["PYTHONPATH"] = os.getcwd()
# mutmut notes which functions a test reaches in this process alone: it has that written down
# beside the environment, and one started elsewhere would look for mutmut's settings and fail.
if os.environ.get("MUTANT_UNDER_TEST") == "stats":
    del os.environ["MUTANT_UNDER_TEST"]
"""
"""What the tests' conftest.py ends with in the copy."""


def mutmut(*arguments: str, quiet: bool = True) -> str:
    """What it printed.

    Raises:
        SystemExit: it failed; with all that it printed.
    """
    done = subprocess.run(
        [MUTMUT, *arguments], text=True, stdout=subprocess.PIPE if quiet else None
    )
    if done.returncode:
        raise SystemExit(f"mutmut {arguments[0]} failed:\n{(done.stdout or '')[-4000:]}")
    return done.stdout or ""


def made() -> dict[str, str]:
    """Every mutant with its file."""
    if not Path("mutants/mutmut-stats.json").exists():
        with Path("tests/conftest.py").open("a") as conftest:
            conftest.write(SET_UP)
        mutmut("run", ANY)
    found = {}
    for path in sorted(Path("mutants").rglob("*.py.meta")):
        file = str(path.relative_to("mutants")).removesuffix(".meta")
        found |= dict.fromkeys(json.loads(path.read_text())["exit_code_by_key"], file)
    return found


def statuses() -> dict[str, str]:
    """How each mutant ended that was tried."""
    lines = mutmut("results", "--all", "1").splitlines()
    pairs = (line.strip().rpartition(": ") for line in lines)
    return {name: status for name, _colon, status in pairs if name}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("count", type=int, help="how many mutants; 0 for all")
    asked.add_argument("seed", type=int, help="of the sample")
    given = asked.parse_args()

    Path("preload.txt").write_text("\n".join(OTHERS))
    files = made()
    names = sorted(files)
    if given.count:
        names = sorted(random.Random(given.seed).sample(names, min(given.count, len(names))))
    mutmut("run", *names, quiet=False)

    ended = statuses()
    alive = [name for name in names if ended[name] in ALIVE]
    for name in alive:
        print(mutmut("show", name))
    tried = collections.Counter(files[name] for name in names)
    left = collections.Counter(files[name] for name in alive)
    for file, count in sorted(tried.items()):
        print(f"{count - left[file]:5} of {count:4} killed  {file}")
    share = 1 - len(alive) / len(names)
    print(f"{len(names) - len(alive)} of {len(names)} killed, {share:.1%}; of {len(files)} in all")


if __name__ == "__main__":
    main()
