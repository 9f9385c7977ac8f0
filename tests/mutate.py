"""A sample of mutants, each held against the tests that reach it; `make mutants` runs this.

It runs in a copy of the tree in which advisor/cache and advisor/tuners are folders and no links:
mutmut names a module by its path. Of the whole run tests/mutants.md tells.
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
"""Running one makes them all, and finds which tests reach which function: of this one, few."""
OTHERS = ("torch", "optuna", "numpy", "msgpack", "rich", "click", "diskcache")
"""Slow to import, and the same for every mutant. None that is a plugin of pytest: that warns of
what was imported before it, which is an error here, so that no test runs."""
FAILED = (1, 2, 3)
"""Exit codes of pytest: a test failed, or could not be imported. Where pytest cannot begin mutmut
calls it a timeout; here the mutant is alive."""
ENDLESS = (-signal.SIGXCPU, -signal.SIGKILL)
SET_UP = """
import sys

from mutmut.mutation import trampoline

# Each mutated function is called through one: where a warning points to, it is advisor's own.
vars(trampoline)["__name__"] = "advisor.trampoline"
# A process that a test starts runs the mutant too, and not what is installed.
os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ["PYTHONPATH"]])
# mutmut notes which functions a test reaches in this process alone: it has that written down
# beside the environment, and one started elsewhere would look for mutmut's settings and fail.
if os.environ.get("MUTANT_UNDER_TEST") == "stats":
    del os.environ["MUTANT_UNDER_TEST"]


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    # What fills a cache is reached by every test that needs it, and not by the first alone.
    for name, module in list(sys.modules.items()):
        if name.startswith("advisor.cache."):
            for one in list(vars(module).values()):
                if hasattr(one, "cache_clear"):
                    one.cache_clear()
"""
"""What the tests' conftest.py ends with in the copy."""


def mutmut(*arguments: str, quiet: bool = True) -> str:
    """What it printed.

    Raises:
        SystemExit: it failed; with all that it printed.
    """
    done = subprocess.run(
        [MUTMUT, *arguments],
        text=True,
        stdout=subprocess.PIPE if quiet else None,
        # As in tests/conftest.py, which comes too late where torch is there before it.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"mutmut {arguments[0]} failed:\n{(done.stdout or '')[-4000:]}")
    return done.stdout or ""


def made() -> list[str]:
    """The names of all mutants."""
    if not Path("mutants/mutmut-stats.json").exists():
        with Path("tests/conftest.py").open("a") as conftest:
            conftest.write(SET_UP)
        mutmut("run", ANY)
    return sorted(exit_codes())


def exit_codes() -> dict[str, int | None]:
    """Of each mutant how its tests ended, None where they did not run."""
    read = (json.loads(one.read_text()) for one in Path("mutants").rglob("*.py.meta"))
    return {name: code for one in read for name, code in one["exit_code_by_key"].items()}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("count", type=int, help="how many mutants; 0 for all")
    asked.add_argument("seed", type=int, help="of the sample")
    given = asked.parse_args()

    Path("preload.txt").write_text("\n".join(OTHERS))
    names = every = made()
    if given.count:
        names = sorted(random.Random(given.seed).sample(every, min(given.count, len(every))))
    mutmut("run", *names, quiet=False)

    ended = exit_codes()
    alive = [name for name in names if ended[name] not in FAILED + ENDLESS]
    endless = [name for name in names if ended[name] in ENDLESS]
    for name in alive:
        print(mutmut("show", name))
    killed, tried = len(names) - len(alive), len(names)
    print(f"{killed} of {tried} killed, {killed / tried:.1%}; of {len(every)} in all")
    print(f"by running out of time: {', '.join(endless) or 'none'}")


if __name__ == "__main__":
    main()
