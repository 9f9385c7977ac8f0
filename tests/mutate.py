"""Runs the tests against a sample of mutants, as part of `make mutants`.

Needs a copy of the tree in which advisor/cache and advisor/tuners are folders, not links, because
mutmut names a module by its path. tests/mutants.md has the results of a full run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

MUTMUT = Path(sys.executable).with_name("mutmut")
ANY = "advisor.tuners.knobs.x_plain__mutmut_1"
"""Running any mutant creates all of them and finds the tests of each. This one has few tests."""
PRELOADED = ("torch", "optuna", "numpy", "msgpack", "rich", "click", "diskcache")
"""Modules to preload, because they are slow to import and never mutated. pytest plugins are left
out: pytest warns if they are imported before it starts, and warnings are errors here."""
FAILED = (1, 2, 3)
"""Exit codes of pytest if a test fails or cannot be imported. If pytest cannot start, mutmut calls
it a timeout; here, the mutant counts as alive."""
TIMED_OUT = (-signal.SIGXCPU, -signal.SIGKILL)
SET_UP = """
import sys

from mutmut.mutation import trampoline

# Calls of mutated functions pass through it. Warnings must skip it, as they skip advisor's code.
vars(trampoline)["__name__"] = "advisor.trampoline"
# Processes that a test starts must run the mutant, not the installed package.
os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ["PYTHONPATH"]])
# mutmut records in this process alone which functions a test reaches. A process in another folder
# would read this variable, look for mutmut's settings and fail.
if os.environ.get("MUTANT_UNDER_TEST") == "stats":
    del os.environ["MUTANT_UNDER_TEST"]


@pytest.fixture(autouse=True)
def empty_caches():
    # So that every test reaches the functions that fill a cache, and not only the first one.
    for name, module in list(sys.modules.items()):
        if name.startswith("advisor.cache."):
            for one in list(vars(module).values()):
                if hasattr(one, "cache_clear"):
                    one.cache_clear()
"""
"""Is appended to tests/conftest.py in the copy."""


def mutmut(*arguments: str, quiet: bool = True) -> str:
    """Runs mutmut and returns its output.

    Raises:
        SystemExit: mutmut failed. Contains the end of its output.
    """
    done = subprocess.run(
        [MUTMUT, *arguments],
        text=True,
        stdout=subprocess.PIPE if quiet else None,
        # As in tests/conftest.py, which runs too late if torch is preloaded.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"mutmut {arguments[0]} failed:\n{(done.stdout or '')[-4000:]}")
    return done.stdout or ""


def all_mutants() -> list[str]:
    """Returns the names of all mutants. Creates them on the first call."""
    if not Path("mutants/mutmut-stats.json").exists():
        with Path("tests/conftest.py").open("a") as conftest:
            conftest.write(SET_UP)
        mutmut("run", ANY)
    return sorted(exit_codes())


def exit_codes() -> dict[str, int | None]:
    """Returns the exit code of each mutant's tests, or None if they did not run."""
    read = (json.loads(one.read_text()) for one in Path("mutants").rglob("*.py.meta"))
    return {name: code for one in read for name, code in one["exit_code_by_key"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="how many mutants; 0 for all")
    parser.add_argument("seed", type=int, help="of the sample")
    given = parser.parse_args()

    Path("preload.txt").write_text("\n".join(PRELOADED))
    names = every = all_mutants()
    if given.count:
        names = sorted(random.Random(given.seed).sample(every, min(given.count, len(every))))
    mutmut("run", *names, quiet=False)

    codes = exit_codes()
    alive = [name for name in names if codes[name] not in FAILED + TIMED_OUT]
    timed_out = [name for name in names if codes[name] in TIMED_OUT]
    for name in alive:
        print(mutmut("show", name))
    killed, tried = len(names) - len(alive), len(names)
    print(f"{killed} of {tried} killed, {killed / tried:.1%}; of {len(every)} in all")
    print(f"by running out of time: {', '.join(timed_out) or 'none'}")


if __name__ == "__main__":
    main()
