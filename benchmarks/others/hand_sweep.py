"""Measures third-party scripts with every config, set without advisor, to find the best speed.

    python benchmarks/others/hand_sweep.py hf-clm ex-siamese --harness FOLDER --results sweep.jsonl

FOLDER has the harness: bench.py, its data makers and the scripts. Each config runs in its own
process, is measured by the script's progress lines and adds one JSON line. Configs that are likely
fast come first, and scripts take turns, until `--limit` seconds have passed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

WRAPPED = Path(__file__).resolve().with_name("wrapped.py")
MIN_LEFT_S = 40.0
"""No process is started with less time left: a small compilation takes this long."""


@dataclass(frozen=True, slots=True)
class Config:
    """Values of the knobs, as in the options of wrapped.py."""

    compile: str = "none"
    format: str = "own"
    layout: str = "own"

    def options(self) -> list[str]:
        return ["--compile", self.compile, "--format", self.format, "--layout", self.layout]


COMPILES = ("none", "reduce-overhead", "default", "cudagraphs")
FORMATS = ("bf16", "tf32", "own")
CONVOLVES = ("ex-siamese", "tv-segment")


def main() -> None:
    args = parse_args()
    sys.path.insert(0, str(args.harness.resolve()))
    end = time.monotonic() + args.limit
    for name, config in interleave(args.scripts):
        if config.compile not in args.compile or config.format not in args.format:
            continue
        left = end - time.monotonic()
        if left < MIN_LEFT_S:
            print("stopped by the limit", flush=True)
            return
        line = {"script": name, **asdict(config), **measure(args, name, config, left)}
        with args.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps({**line, "windows": None, "stderr": line["stderr"][-200:]}), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT")
    parser.add_argument("--harness", type=Path, required=True, help="folder with bench.py")
    parser.add_argument("--compile", nargs="+", choices=COMPILES, default=COMPILES)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds to measure per start")
    parser.add_argument("--start-timeout", type=float, default=120.0)
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--data", type=Path, default=Path("/tmp/scripts-data"))
    parser.add_argument("--results", type=Path, default=Path("hand_sweep.jsonl"))
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU")
    return parser.parse_args()


def interleave(scripts: list[str]) -> Iterator[tuple[str, Config]]:
    """Yields the first config of each script, then the second of each, and so on."""
    for row in itertools.zip_longest(*(configs(name) for name in scripts)):
        yield from ((name, config) for name, config in zip(scripts, row, strict=True) if config)


def configs(name: str) -> list[Config]:
    """Returns all configs of a script: unmodified, then likely fast ones, then the others."""
    layouts = ("channels_last", "own") if name in CONVOLVES else ("own",)
    likely = [Config(), Config("reduce-overhead", "bf16", layouts[0]), Config(format="bf16")]
    likely += [Config("default", "bf16", layouts[0]), Config("cudagraphs", "own")]
    likely += [Config("cudagraphs", "bf16"), Config("reduce-overhead", "tf32", layouts[0])]
    every = (
        Config(compile_by, number_format, layout)
        for layout in layouts
        for number_format in FORMATS
        for compile_by in COMPILES
    )
    return list(dict.fromkeys([*likely, *every]))


def measure(args: argparse.Namespace, name: str, config: Config, left: float) -> dict[str, Any]:
    """Measures the script with a config, using the harness."""
    bench, makers = import_module("bench"), import_module("data")
    script = bench.SCRIPTS[name]
    root = (args.data / "small" if args.small else args.data).resolve()
    for kind in script.sets:
        makers.make(kind, root, args.small)
    python, *options = bench.command(script, root, args.small)
    result = bench.run(
        script,
        [python, str(WRAPPED), *config.options(), *options],
        bench.place(script, f"by-hand-{name}", root),
        bench.environment(script, root, f"by-hand-{name}", args.gpu),
        min(args.seconds, left / 2),
        min(args.start_timeout, left - args.seconds),
    )
    return summary(result, "own" if script.own else "wall")


def summary(result: dict[str, Any], speed_key: str) -> dict[str, Any]:
    """Selects the figures of one start."""
    windows = result["wall_windows"]
    return {
        "samples_per_s": result[speed_key],
        "quartiles": statistics.quantiles(windows) if len(windows) > 3 else None,
        "windows": windows,
        "overall": result["overall"],
        "first_progress_s": result["first_progress_s"],
        "seconds": result["seconds"],
        "losses_first": result["losses_first"],
        "losses_last": result["losses_last"],
        "exit": result["returncode"] if result["ended_itself"] else None,
        "stderr": result["stderr"][-1500:] if failed(result) else "",
    }


def failed(result: dict[str, Any]) -> bool:
    return not result["progress_lines"] or bool(result["ended_itself"] and result["returncode"])


if __name__ == "__main__":
    main()
