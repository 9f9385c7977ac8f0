"""Compares scripts patched by `advisor patch` with `advisor run`, in turn on one GPU.

    python benchmarks/others/patched.py --harness FOLDER --runs 3 --results patched.jsonl

FOLDER has the harness: bench.py, its data makers and the scripts. Each script is tuned, patched in
a copy, and started without advisor on its path. Each adds one JSON line to `--results`: whether the
diff applied, the edits that are left, the ratio of the speeds, and the losses.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from run_others import harness_parser, report

SCRIPTS = ["ex-siamese", "ex-vit", "tv-resnet50", "tv-segment", "nanogpt-char-eager", "hf-clm"]
ADVISOR = [sys.executable, "-m", "advisor"]


def main() -> None:
    args = parse_args()
    sys.path.insert(0, str(args.harness.resolve()))
    bench: Any = importlib.import_module("bench")
    for name in args.scripts:
        try:
            line = {"script": name, "runs": args.runs, **compare(bench, name, args)}
        except RuntimeError as exc:
            line = {"script": name, "failed": str(exc)}
        report(args, line)


def parse_args() -> argparse.Namespace:
    parser = harness_parser(__doc__)
    parser.add_argument("scripts", nargs="*", default=SCRIPTS, metavar="SCRIPT")
    parser.add_argument("--budget", default="90s", help="of each tuning")
    parser.add_argument("--runs", type=int, default=3, help="starts of each version")
    parser.add_argument("--data", type=Path, default=Path("others-data"), help="for made-up data")
    parser.add_argument("--results", type=Path, default=Path("patched.jsonl"))
    parser.add_argument("--keep", action="store_true", help="use the record of an earlier tuning")
    return parser.parse_args()


def compare(bench: Any, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tunes, patches and starts one script. Returns the result. Raises RuntimeError."""
    script, root = bench.SCRIPTS[name], (args.data / ("small" * args.small)).resolve()
    for kind in script.sets:
        bench.makers.make(kind, root, args.small)
    (root / "inductor").mkdir(parents=True, exist_ok=True)
    words = bench.command(script, root, args.small)
    advised = bench.environment(script, root, name, args.gpu, args.advisor.resolve())
    plain = bench.environment(script, root, name, args.gpu)
    if not args.keep:
        options, limit = ["--budget", args.budget, *args.tune_option], 900
        tuned = bench.tune(words, bench.place(script, name, root), advised, options, limit)
        if tuned["returncode"]:
            raise RuntimeError(tuned["stderr"][-600:])
    folder = bench.place(script, name, root)
    records = json.loads(output([*ADVISOR, "show", "--json"], folder, advised))["records"]
    if not records:
        raise RuntimeError("nothing is tuned")
    made = json.loads(output([*ADVISOR, "patch", "--json", records[0]["id"]], folder, advised))
    speeds: dict[str, list[float]] = {"advisor run": [], "patched": []}
    losses: dict[str, list[Any]] = {"advisor run": [], "patched": []}
    failed = []
    for _ in range(args.runs):
        for way in speeds:
            folder, command = bench.place(script, name, root), [*ADVISOR, "run", "--", *words]
            if way == "patched":
                command = [*words, *made["arguments"]]
                if made["diff"]:
                    output(["patch", "-p1"], folder, plain, made["diff"])
            environment = plain if way == "patched" else advised
            ran = bench.run(script, command, folder, environment, args.seconds, 240)
            speed = ran["own" if script.own else "wall"]
            speeds[way] += [speed] if speed else []
            losses[way].append([ran["losses_first"], ran["losses_last"]])
            if not speed or (ran["ended_itself"] and ran["returncode"]):
                failed.append([way, (ran["stderr"] or ran["stdout"])[-600:]])
    medians = [statistics.median(speeds[way]) for way in ("patched", "advisor run") if speeds[way]]
    return {
        "ratio": round(medians[0] / medians[1], 3) if len(medians) == 2 else None,
        "advice": re.findall("# advisor: (.*)", made["diff"]) or records[0]["id"],
        "left": made["left"],
        "arguments": made["arguments"],
        "edited_lines": made["diff"].count("\n+") - made["diff"].count("\n+++"),
        "speeds": speeds,
        "losses": losses,
        "failed": failed,
    }


def output(words: list[str], folder: Path, environment: dict[str, str], given: str = "") -> str:
    """Returns what a command prints. Code 3 of `advisor patch` says that edits are left.

    Raises RuntimeError if the command fails.
    """
    done = subprocess.run(
        words, cwd=folder, env=environment, input=given, capture_output=True, text=True
    )
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{words}: {done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
