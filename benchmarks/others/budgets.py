"""Tunes a third-party script once per budget and measures `advisor run` after each tuning.

    python benchmarks/others/budgets.py hf-clm --budgets 45 60 300 --harness FOLDER --commit SHA

FOLDER has the harness (see run_others.py). The unmodified script is measured first, once. Each
tuning starts without records and compiled code. Every budget adds a line to `--results`, in the
format of run_others.py.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from run_others import OVERRUN, ROOT, START_S, report, settings, summary

PYTHON_ADVISOR = [sys.executable, "-m", "advisor"]


def main() -> None:
    args = parse_args()
    sys.path.insert(0, str(args.harness.resolve()))
    bench = importlib.import_module("bench")

    end = time.monotonic() + args.limit
    script, root = bench.SCRIPTS[args.script], args.data.resolve()
    for kind in script.sets:
        bench.makers.make(kind, root, False)
    unmodified = measure(bench, args, [], advisor=None)
    for budget in args.budgets:
        args.budget = budget
        needed, left = START_S + args.seconds + OVERRUN * args.budget, end - time.monotonic()
        if needed > left:
            line = {"left_out": f"needs {needed:.0f} s, {left:.0f} s left"}
        else:
            line = tune(bench, args, unmodified)
        report(args, {**settings(args, args.script), **line})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("--budgets", type=float, nargs="+", default=[45.0, 60.0, 90.0, 300.0])
    parser.add_argument("--harness", type=Path, required=True, help="folder with bench.py")
    parser.add_argument("--commit", default="", help="commit of the project, for the results")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds to measure per start")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--data", type=Path, required=True, help="folder for the synthetic data")
    parser.add_argument("--results", type=Path, default=Path("others.jsonl"))
    parser.add_argument("--log", type=Path, help="file for the output of the tunings")
    parser.set_defaults(runs=1)
    return parser.parse_args()


def prepare(
    bench: ModuleType, args: argparse.Namespace, advisor: Path | None
) -> tuple[list[str], Path, dict[str, str]]:
    """Copies the script's folder. Returns its command, folder and environment."""
    script, root = bench.SCRIPTS[args.script], args.data.resolve()
    command, folder = bench.command(script, root, False), bench.place(script, args.script, root)
    return command, folder, bench.environment(script, root, args.script, args.gpu, advisor)


def measure(
    bench: ModuleType, args: argparse.Namespace, prefix: list[str], advisor: Path | None
) -> dict[str, Any]:
    """Starts the script and measures its speed."""
    command, folder, env = prepare(bench, args, advisor)
    script = bench.SCRIPTS[args.script]
    result: dict[str, Any] = bench.run(script, prefix + command, folder, env, args.seconds, 180.0)
    return result


def tune(bench: ModuleType, args: argparse.Namespace, unmodified: dict[str, Any]) -> dict[str, Any]:
    """Tunes the script from scratch, then measures a start with the advice."""
    begin, root = time.monotonic(), args.data.resolve()
    for kept in ("cache", "inductor"):
        shutil.rmtree(root / kept / args.script, ignore_errors=True)
    (root / "inductor").mkdir(exist_ok=True)
    options = ["--budget", f"{args.budget:.0f}s"]
    tuning = bench.tune(*prepare(bench, args, ROOT), options, 1.5 * args.budget + 60)
    if args.log:
        with args.log.open("a") as file:
            file.write(f"== {args.script}, {args.budget:.0f} s\n{tuning['stdout']}\n")
            file.write(f"{tuning['stderr']}\n")
    advised = measure(bench, args, [*PYTHON_ADVISOR, "run", "--"], advisor=ROOT)
    result = {"as_it_is": [unmodified], "advisor_run": [advised], "tune": tuning}
    result |= bench.summary(bench.SCRIPTS[args.script], result) | {
        "wall_s": round(time.monotonic() - begin, 1)
    }
    return summary(result)


if __name__ == "__main__":
    main()
