"""Tunes a command, then compares `advisor run` with the original and a hand-tuned version.

    python benchmarks/runs/compare.py --results runs.jsonl --by-hand -- \\
        python benchmarks/runs/resnet50.py

The hand-tuned version applies the record's best config itself. The versions run in turn, for as
many rounds as the time allows. The jobs print the samples/s and losses that are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METER = Path(__file__).with_name("meter")
RATE = re.compile(r"([0-9.,]+) (?:samples|steps)/s over")
LOSS = re.compile(r"loss'?:? '?([0-9.]+)")


def run(words: list[str], environment: dict[str, str], limit_s: float) -> tuple[str, float]:
    """Runs a command. Returns its output and its seconds."""
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
    rates = RATE.findall(text)
    return float(rates[-1].replace(",", "")) if rates else float("nan")


def diff(config: dict[str, object], default: dict[str, object]) -> dict[str, object]:
    """Returns the values of a config that differ from the default."""
    return {name: value for name, value in config.items() if default.get(name) != value}


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Summarizes a record without its trials."""
    default = record["baseline"]["config"]
    [winner] = [one["choice"] for one in record["winners"] if one["use"] == "pilot"]
    figures = ("speedup", "speedup_low", "speedup_high")
    trials = record["trials"]
    return {
        "winner": diff(winner["config"], default) | {name: winner[name] for name in figures},
        "raced": [
            diff(one["config"], default) | {name: one[name] for name in figures}
            for one in record["raced"]
        ],
        "compared": [
            [diff(one["config"], default), one["measurement"]["reason"], round(one["seconds"], 1)]
            for one in trials
            if one["stage"] == "numerics"
        ],
        "trials": sum(one["stage"] == "compute" for one in trials),
        "torch": record["key"]["environment"]["software"]["torch"],
        "device": record["key"]["environment"]["device"]["name"],
    }


def hand_options(config: dict[str, object]) -> list[str]:
    """Returns the options that make a job of this folder apply a config itself."""
    words = [config["compile"]] if config.get("compile", "none") != "none" else []
    words += [config["precision"]] if config.get("precision") in ("bf16", "tf32") else []
    words += [name for name in ("cudnn_benchmark", "channels_last") if config.get(name)]
    words += ["fused"] if config.get("fused_optimizer") else []
    options = ["--by-hand", ",".join(map(str, words))]
    workers = config.get("num_workers")
    return [*options, "--workers", str(workers)] if workers is not None else options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--budget", default="150s")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--by-hand", action="store_true", help="also run the job hand-tuned")
    parser.add_argument(
        "--hand", metavar="COMMAND", help="a hand-tuned version, which applies $HAND"
    )
    parser.add_argument("--until", type=float, default=1e9, help="no new rounds after (seconds)")
    parser.add_argument(
        "--meter", action="store_true", help="the command prints no speed: measure it with meter/"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds per command")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command, began = args.command[1:], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = {"ADVISOR_CACHE": str(Path(folder) / "store")}
        advisor = [sys.executable, "-m", "advisor"]
        _, took_s = run(
            [*advisor, "tune", "--budget", args.budget, "--", *command], store, 2 * args.limit
        )
        listing = subprocess.run(
            [*advisor, "show", "--json"], env=os.environ | store, capture_output=True, text=True
        ).stdout
        records = [summary(one) for one in json.loads(listing or "{}").get("records", [])]
        steps = [] if args.meter else ["--steps", str(args.steps)]
        if args.meter:
            behind = os.environ.get("PYTHONPATH", "")
            store |= {"METER_STEPS": str(args.steps), "PYTHONPATH": f"{METER}:{behind}"}
        ways = {
            "as it is": [*command, *steps],
            "advisor run": [*advisor, "run", "--", *command, *steps],
        }
        if args.by_hand and records:
            ways["by hand"] = [*command, *steps, *hand_options(records[0]["winner"])]
        if args.hand and records:
            ways["by hand"] = shlex.split(args.hand)
            store["HAND"] = hand_options(records[0]["winner"])[1]
        rates: dict[str, list[float]] = {way: [] for way in ways}
        losses: dict[str, list[float]] = {}
        for number in range(args.rounds):
            if number and time.monotonic() - began > args.until:
                break
            for way, words in ways.items():
                text, _ = run(words, store, args.limit)
                rates[way].append(speed(text))
                losses[way] = [float(one) for one in LOSS.findall(text)][:8]
    row = {
        "command": shlex.join(command),
        "budget": args.budget,
        "tuned_s": round(took_s, 1),
        "per_s": rates,
        "over_as_it_is": relative_to(rates, "as it is"),
        "over_by_hand": relative_to(rates, "by hand"),
        "losses": losses,
        "records": records,
    }
    with args.results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


def relative_to(rates: dict[str, list[float]], base: str) -> dict[str, list[float]]:
    """Divides the rates of each way by those of `base`, round by round."""
    return {
        way: [round(one / plain, 3) for one, plain in zip(rates[way], rates[base], strict=True)]
        for way in rates
        if way != base and base in rates
    }


if __name__ == "__main__":
    main()
