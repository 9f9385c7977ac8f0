"""Tune a command as it is, then hold `advisor run` against it as it is and as written by hand.

    python benchmarks/runs/compare.py --results runs.jsonl --by-hand reduce-overhead -- \\
        python benchmarks/runs/resnet50.py

The jobs print their own samples/s and losses; what is compared is what they print.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METER = Path(__file__).with_name("meter")
RATE = re.compile(r"([0-9.,]+) (?:samples|steps)/s over")
LOSS = re.compile(r"loss'?:? '?([0-9.]+)")


def spoken(words: list[str], environment: dict[str, str], limit_s: float) -> tuple[str, float]:
    """What a command prints, and how long it took."""
    began = time.monotonic()
    done = subprocess.run(
        words,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    sys.stdout.write(f"$ {shlex.join(words)}\n{done.stdout[-3000:]}\n")
    sys.stdout.flush()
    return done.stdout, time.monotonic() - began


def speed(text: str) -> float:
    found = RATE.findall(text)
    return float(found[-1].replace(",", "")) if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--by-hand", nargs="*", default=[], metavar="MODE")
    parser.add_argument(
        "--meter", action="store_true", help="the command counts no steps itself: see meter/"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one command")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:]
    with tempfile.TemporaryDirectory() as folder:
        store = {"ADVISOR_CACHE": str(Path(folder) / "store")}
        advisor = [sys.executable, "-m", "advisor"]
        _, took = spoken(
            [*advisor, "tune", "--budget", args.budget, "--", *command], store, 2 * args.limit
        )
        listed = subprocess.run(
            [*advisor, "show", "--json"], env=os.environ | store, capture_output=True, text=True
        ).stdout
        steps = [] if args.meter else ["--steps", str(args.steps)]
        if args.meter:
            behind = os.environ.get("PYTHONPATH", "")
            store |= {"METER_STEPS": str(args.steps), "PYTHONPATH": f"{METER}:{behind}"}
        ways = {
            "as it is": [*command, *steps],
            "advisor run": [*advisor, "run", "--", *command, *steps],
            **{f"by hand, {m}": [*command, *steps, "--by-hand", m] for m in args.by_hand},
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        losses: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for way, words in ways.items():
                text, _ = spoken(words, store, args.limit)
                rates[way].append(speed(text))
                losses[way] = [float(one) for one in LOSS.findall(text)][:8]
    plain = statistics.median(rates["as it is"]) or float("nan")
    row = {
        "command": shlex.join(command),
        "tuned_s": round(took, 1),
        "samples_per_s": rates,
        "over_as_it_is": {w: round(statistics.median(r) / plain, 3) for w, r in rates.items()},
        "losses": losses,
        "records": json.loads(listed or "null"),
    }
    with args.results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({k: v for k, v in row.items() if k != "records"}, indent=1))


if __name__ == "__main__":
    main()
