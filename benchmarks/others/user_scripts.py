"""Measures the scripts in benchmarks/user_scripts with several configs, without advisor.

    python benchmarks/others/user_scripts.py trainer dcgan --rounds 3 --results by_hand.jsonl

Each start runs in an empty folder and ends after `--seconds` of measured steps. The configs of a
script take turns, so a drift of the host affects all of them alike. Each start adds one JSON line.
The speed-ups over the unmodified script are printed at the end.
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
COMMON = (UNMODIFIED, "--threads 1", "--compile default", "--fused", "--format bf16")
CONFIGS = {
    "trainer": (*COMMON, "--layout channels_last", "--layout channels_last --compile default"),
    "dcgan": (*COMMON, "--layout channels_last", "--layout channels_last --compile default"),
    "lstm_padded": COMMON,
    "autocast_workers": (*COMMON[:-1], "--layout channels_last", "--without autocast"),
    "accumulate_ema": (*(c for c in COMMON if "compile" not in c), "--without compile"),
    "two_models": (*COMMON, "--layout channels_last", "--layout channels_last --compile default"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", default=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds to measure per start")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each start")
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
                    **measure(args, name, config),
                }
                with args.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                rates[config].append(line["steps_per_s"])
        for config, speeds in rates.items():
            print(name, config or "unmodified", *ratios(speeds, rates[UNMODIFIED]), flush=True)


def ratios(speeds: list[float], unmodified: list[float]) -> list[str]:
    """Formats the median speed-up of the rounds, then each of them."""
    each = [a / b if b else 0.0 for a, b in zip(speeds, unmodified, strict=True)]
    return [f"{statistics.median(each):.2f}x", *(f"{one:.2f}" for one in each)]


def measure(args: argparse.Namespace, name: str, config: str) -> dict[str, Any]:
    """Starts the script. Returns its steps per second, 0 if it failed."""
    options = [
        "--every",
        *config.split(),
        "--seconds",
        str(args.seconds),
        str(SCRIPTS / f"{name}.py"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            finished = subprocess.run(
                [sys.executable, str(WRAPPED), *options, *ARGUMENTS.get(name, [])],
                cwd=folder,
                env=os.environ | {"TMPDIR": folder},
                capture_output=True,
                text=True,
                timeout=args.limit,
            )
        except subprocess.TimeoutExpired:
            return {"steps_per_s": 0.0, "stderr": "timed out"}
    for line in finished.stdout.splitlines():
        if line.startswith("{"):
            return dict(json.loads(line))
    return {"steps_per_s": 0.0, "stderr": finished.stderr[-1000:]}


if __name__ == "__main__":
    main()
