"""Measures the speed-ups that `advisor tune TARGET` finds in a budget: loop and captured step.

    python benchmarks/workloads.py RESULTS --commit SHA --budget 150s --limit 560 resnet50 vit_b_16

Each target is tuned alone, with an empty store, and adds a JSON line to RESULTS.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGETS = {
    "resnet50": ("torchvision:resnet50", "64x3x224x224"),
    "mobilenet_v3_large": ("torchvision:mobilenet_v3_large", "64x3x224x224"),
    "vit_b_16": ("torchvision:vit_b_16", "64x3x224x224"),
    "efficientnet_v2_s": ("torchvision:efficientnet_v2_s", "32x3x300x300"),
    "gpt2": ("examples/gpt2.py:GPT2", "8x1024"),
    "mnist": ("examples/mnist.py", "128x1x28x28"),
    "lstm": ("benchmarks/targets/lstm.py", "64x128x256"),
}
MORE = {"gpt2": ("--dtype", "int64", "--vocab", "50304", "--optimizer", "adamw")}


def tune(name: str, budget: str, limit_s: float) -> dict[str, Any]:
    """Tunes a target. Returns its record, log and duration."""
    target, shape = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "advisor", "tune", target, "--shape", shape, "--json"]
        command += ["--budget", budget, *MORE.get(name, ())]
        began = time.monotonic()
        finished = subprocess.run(
            command,
            env={**os.environ, "ADVISOR_CACHE": f"disk:{folder}"},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    result: dict[str, Any] = {
        "wall_s": round(time.monotonic() - began, 1),
        "log": finished.stderr[-6000:],
    }
    try:
        result |= json.loads(finished.stdout)
    except ValueError:
        result["failed"] = finished.stdout[-500:] or f"exit code {finished.returncode}"
    return result


def figures_of(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Extracts the figures of a record that are compared between commits."""
    figures: dict[str, Any] = {"target": name, "wall_s": result["wall_s"]}
    record = result.get("record")
    if not record:
        return figures | {"failed": result.get("failed", ""), "log": result["log"]}
    for one in record.get("winners", ()):
        choice = one["choice"]
        use = f"{one['use']}{' free' if one['free'] else ''}"
        figures[use] = {
            "speedup": choice["speedup"],
            "low": choice["speedup_low"],
            "high": choice["speedup_high"],
            "config": choice["config"],
        }
    trials = record.get("trials", ())
    figures["compared"] = [
        (t["config"], t["measurement"]["outcome"], t["measurement"]["reason"])
        for t in trials
        if t["stage"] == "numerics"
    ]
    return figures | {"log": result["log"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("names", nargs="+", choices=TARGETS)
    parser.add_argument("--commit", default="")
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds for all targets")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit
    for name in args.names:
        left_s = deadline - time.monotonic()
        try:
            figures = figures_of(name, tune(name, args.budget, left_s))
        except (subprocess.TimeoutExpired, ValueError):
            figures = {"target": name, "failed": f"timed out after {left_s:.0f} s"}
        figures |= {"commit": args.commit, "budget": args.budget}
        with args.results.open("a") as file:
            file.write(json.dumps(figures) + "\n")
        speedups = {use: figures[use]["speedup"] for use in ("loop", "capture") if use in figures}
        print(name, speedups or figures.get("failed"), figures.get("wall_s"), flush=True)


if __name__ == "__main__":
    main()
