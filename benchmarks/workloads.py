"""What `advisor tune TARGET` reaches within a budget: speed-ups of the loop and the captured step.

    python benchmarks/workloads.py RESULTS --commit SHA --budget 150s --limit 560 resnet50 vit_b_16

Each target is tuned by itself, with an empty store. A line of JSON for each is added to RESULTS.
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


def tuned(name: str, budget: str, limit_s: float) -> dict[str, Any]:
    """The record that a tuning leaves, and what it printed."""
    target, shape = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "advisor", "tune", target, "--shape", shape, "--json"]
        words += ["--budget", budget, *MORE.get(name, ())]
        began = time.monotonic()
        done = subprocess.run(
            words,
            env={**os.environ, "ADVISOR_CACHE": f"disk:{folder}"},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    found: dict[str, Any] = {
        "wall_s": round(time.monotonic() - began, 1),
        "log": done.stderr[-6000:],
    }
    try:
        found |= json.loads(done.stdout)
    except ValueError:
        found["failed"] = done.stdout[-500:] or f"exit code {done.returncode}"
    return found


def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Of a record what is compared from commit to commit."""
    told: dict[str, Any] = {"target": name, "wall_s": found["wall_s"]}
    record = found.get("record")
    if not record:
        return told | {"failed": found.get("failed", ""), "log": found["log"]}
    for one in record.get("winners", ()):
        choice = one["choice"]
        at = f"{one['use']}{' free' if one['free'] else ''}"
        told[at] = {
            "speedup": choice["speedup"],
            "low": choice["speedup_low"],
            "high": choice["speedup_high"],
            "config": choice["config"],
        }
    trials = record.get("trials", ())
    told["compared"] = [
        (t["config"], t["measurement"]["outcome"], t["measurement"]["reason"])
        for t in trials
        if t["stage"] == "numerics"
    ]
    return told | {"log": found["log"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("names", nargs="+", choices=TARGETS)
    parser.add_argument("--commit", default="")
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds of all of it")
    args = parser.parse_args()
    ends = time.monotonic() + args.limit
    for name in args.names:
        left_s = ends - time.monotonic()
        try:
            told = row(name, tuned(name, args.budget, left_s))
        except (subprocess.TimeoutExpired, ValueError):
            told = {"target": name, "failed": f"not over within {left_s:.0f} s"}
        told |= {"commit": args.commit, "budget": args.budget}
        with args.results.open("a") as file:
            file.write(json.dumps(told) + "\n")
        shown = {use: told[use]["speedup"] for use in ("loop", "capture") if use in told}
        print(name, shown or told.get("failed"), told.get("wall_s"), flush=True)


if __name__ == "__main__":
    main()
