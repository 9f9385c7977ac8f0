"""Compares `advisor run` with unmodified third-party scripts, one after another on one GPU.

    python benchmarks/others/run_others.py hf-clm ex-vit --harness FOLDER --commit SHA --gpu 0

FOLDER has the harness: bench.py, its data makers and the scripts. Each script adds one JSON line to
`--results`; `--full` gets all other measurements of the harness. Two of these commands may run at
once on two GPUs, with different scripts. After `--limit` seconds the harness is stopped, and the
results so far are written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 25.0
"""Seconds from the start of a script to its first progress line, as measured on an H200."""
OVERRUN = 1.15
"""Duration of a tuning as a multiple of its budget, with starts and ends of its processes."""
END_S = 30.0
"""Seconds that the harness gets to end its processes."""


def main() -> None:
    args = parse_args()
    end = time.monotonic() + args.limit
    args.full.mkdir(parents=True, exist_ok=True)
    for name in args.scripts:
        needed, left = expected_s(args), end - time.monotonic()
        if needed > left:
            line = {**settings(args, name), "left_out": f"needs {needed:.0f} s, {left:.0f} s left"}
        else:
            line = {**settings(args, name), **compare(args, name, left)}
        report(args, line)


def report(args: argparse.Namespace, line: dict[str, Any]) -> None:
    """Appends a line to the results and prints it."""
    with args.results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def harness_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark that uses the harness."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--harness", type=Path, required=True, help="folder with bench.py")
    parser.add_argument("--advisor", type=Path, default=ROOT, help="the project to test")
    parser.add_argument("--seconds", type=float, default=25.0, help="seconds to measure per start")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--tune-option", action="append", default=[])
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU")
    return parser


def parse_args() -> argparse.Namespace:
    parser = harness_parser(__doc__)
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT")
    parser.add_argument("--commit", default="", help="commit of the project, for the results")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for each tuning")
    parser.add_argument("--runs", type=int, default=1, help="starts of each version")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--data", type=Path, help="folder for the synthetic data")
    parser.add_argument("--results", type=Path, default=Path("others.jsonl"))
    parser.add_argument("--full", type=Path, default=Path("others-full"))
    return parser.parse_args()


def expected_s(args: argparse.Namespace) -> float:
    """Returns the seconds that a script takes if nothing goes wrong."""
    starts = 2 * args.runs * (START_S + args.seconds)
    return float(starts + OVERRUN * args.budget)


def settings(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Returns what identifies a result: script, commit and settings."""
    return {
        "script": name,
        "commit": args.commit,
        "budget_s": args.budget,
        "runs": args.runs,
        "measured_s": args.seconds,
        "gpu": args.gpu,
    }


def compare(args: argparse.Namespace, name: str, left: float) -> dict[str, Any]:
    """Runs the harness on one script for at most `left` seconds. Returns the summary."""
    out = (args.full / f"{name}.json").resolve()
    out.unlink(missing_ok=True)
    command = [sys.executable, str(args.harness / "bench.py"), name, "--out", str(out)]
    command += ["--advisor", str(args.advisor), "--budget", f"{args.budget:.0f}s"]
    command += ["--runs", str(args.runs), "--seconds", str(args.seconds), "--gpu", args.gpu]
    command += ["--data", str(args.data.resolve())] if args.data else []
    command += [f"--tune-option={word}" for word in args.tune_option]
    command += ["--small"] if args.small else []
    with (args.full / f"{name}.log").open("w") as log:
        stopped = run_with_limit(command, log.fileno(), left - END_S)
    if not out.exists():
        return {"failed": (args.full / f"{name}.log").read_text()[-600:]}
    summarized = summary(json.loads(out.read_text()))
    return {**summarized, "stopped": "by the limit"} if stopped else summarized


def run_with_limit(command: list[str], log: int, seconds: float) -> bool:
    """Runs a command. Returns whether it was interrupted after `seconds`."""
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        process.wait(max(0.0, seconds))
        return False
    except subprocess.TimeoutExpired:
        # An interrupt lets the harness end the processes that it started.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S - 5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Summarizes one script: the output of the tuning, and the speeds before and after it."""
    tuned = result.get("told") or {}
    judged = result.get("judged_by", "wall")
    starts = {way: result[way] for way in ("as_it_is", "advisor_run")}
    return {
        "judged_by": judged,
        "ratio": result.get("ratio"),
        "spread": spread(starts, judged),
        "best_trial": tuned.get("best_trial"),
        "trials": tuned.get("trials"),
        "advised": tuned.get("advised"),
        "verified": tuned.get("verified"),
        "unfinished": tuned.get("unfinished"),
        "tune_s": tuned.get("seconds"),
        "seconds": result.get("wall_s"),
        "speeds": {way: [start[judged] for start in runs] for way, runs in starts.items()},
        "windows": {way: [start["wall_windows"] for start in runs] for way, runs in starts.items()},
        "losses": {way: [losses(start) for start in runs] for way, runs in starts.items()},
        "failed_starts": {way: failures(runs) for way, runs in starts.items()},
    }


def failures(runs: list[dict[str, Any]]) -> list[str]:
    """Returns the last error output of starts that failed or printed no progress."""
    return [
        f"exit {start['returncode']}: {start['stderr'][-300:]}"
        for start in runs
        if not start["progress_lines"] or (start["ended_itself"] and start["returncode"])
    ]


def losses(start: dict[str, Any]) -> dict[str, Any]:
    """Returns the first and last losses of one start."""
    return {"first": start["losses_first"], "last": start["losses_last"]}


def spread(starts: dict[str, list[dict[str, Any]]], judged: str) -> list[float] | None:
    """Returns the lowest and highest ratio of two starts; of two quartiles if there is one each."""
    speeds = {
        way: [start[judged] for start in runs if start[judged]] for way, runs in starts.items()
    }
    if all(len(runs) > 1 for runs in speeds.values()):
        ratios = [after / before for before, after in product(*speeds.values())]
        return [round(min(ratios), 3), round(max(ratios), 3)]
    windows = {
        way: [w for start in runs for w in start["wall_windows"]] for way, runs in starts.items()
    }
    if any(len(runs) < 4 for runs in windows.values()):
        return None
    before, after = (statistics.quantiles(windows[way]) for way in ("as_it_is", "advisor_run"))
    return [round(after[0] / before[2], 3), round(after[2] / before[0], 3)]


if __name__ == "__main__":
    main()
