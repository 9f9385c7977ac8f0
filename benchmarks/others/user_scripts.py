"""Measures the scripts of benchmarks/user_scripts with each config set by hand, without advisor.

    python benchmarks/others/user_scripts.py trainer dcgan --rounds 3 --results by_hand.jsonl

Each start is a process of its own in an empty folder, and is ended after `--seconds` of steps that
count. The configs of a script take turns, so that a host that drifts is the same for all. One JSON
line for each start; the ratios over the unmodified script are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1] / "user_scripts"
WRAPPED = Path(__file__).resolve().with_name("wrapped.py")
ARGUMENTS = {"two_models": ["--epochs", "1000"], "accumulate_ema": ["--steps", "100000"]}
UNMODIFIED = ""
EVERY = (UNMODIFIED, "--threads 1", "--compile default", "--fused", "--format bf16")
CONFIGS = {
    "trainer": (*EVERY, "--layout channels_last", "--layout channels_last --compile default"),
    "dcgan": (*EVERY, "--layout channels_last", "--layout channels_last --compile default"),
    "lstm_padded": EVERY,
    "autocast_workers": (*EVERY[:-1], "--layout channels_last", "--without autocast"),
    "accumulate_ema": (*(c for c in EVERY if "compile" not in c), "--without compile"),
    "two_models": (*EVERY, "--layout channels_last", "--layout channels_last --compile default"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", default=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="that count in each start")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one start")
    parser.add_argument("--results", type=Path, default=Path("by_hand.jsonl"))
    args = parser.parse_args()
    for name in args.scripts:
        rates: dict[str, list[float]] = {config: [] for config in CONFIGS[name]}
        for turn in range(args.rounds):
            for config in CONFIGS[name] if turn % 2 == 0 else CONFIGS[name][::-1]:
                line = {
                    "script": name,
                    "config": config,
                    "round": turn,
                    **started(args, name, config),
                }
                with args.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                rates[config].append(line["steps_per_s"])
        for config, seen in rates.items():
            print(name, config or "unmodified", *ratios(seen, rates[UNMODIFIED]), flush=True)


def ratios(seen: list[float], unmodified: list[float]) -> list[str]:
    """The median ratio of the rounds, then each."""
    each = [a / b if b else 0.0 for a, b in zip(seen, unmodified, strict=True)]
    return [f"{statistics.median(each):.2f}x", *(f"{one:.2f}" for one in each)]


def started(args: argparse.Namespace, name: str, config: str) -> dict[str, Any]:
    """Steps per second of one start; 0 where it failed."""
    words = [
        "--every",
        *config.split(),
        "--seconds",
        str(args.seconds),
        str(SCRIPTS / f"{name}.py"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, str(WRAPPED), *words, *ARGUMENTS.get(name, [])],
                cwd=folder,
                env=os.environ | {"TMPDIR": folder},
                capture_output=True,
                text=True,
                timeout=args.limit,
            )
        except subprocess.TimeoutExpired:
            return {"steps_per_s": 0.0, "stderr": "timed out"}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return dict(json.loads(line))
    return {"steps_per_s": 0.0, "stderr": done.stderr[-1000:]}


if __name__ == "__main__":
    main()
