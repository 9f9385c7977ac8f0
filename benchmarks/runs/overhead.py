"""Measures what `advisor run` costs a script if nothing is advised: per step and per start.

    python benchmarks/runs/overhead.py --results overhead.jsonl

Steps: the script runs unmodified, unmodified again, under `advisor run` with an empty store, and
with a record whose best config is the unmodified script. All four processes take turns at blocks of
steps while the others wait, so the state of the machine affects all of them alike. A ratio compares
two blocks of the same turn; the ratio of the two unmodified processes is the noise. On a CPU,
seconds are the CPU time of the process.

Instructions (--counted, needs valgrind): callgrind counts those of the process in a block of steps.
Other load does not change them, so they show differences far below 1%. They include no waiting.

    python benchmarks/runs/overhead.py --nets tiny --turns 0 --starts 0 --counted 200

Starts: the CPU seconds before the script's first line (including `advisor run` itself), of
`import torch`, and of steps 2 to 8, in which advisor looks up its advice. The minimum of some
turns counts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PLAIN, AGAIN, UNKNOWN, KNOWN = "as it is", "as it is, again", "nothing known", "known: as it is"
DECIDED = 8
"""Steps after which advisor has decided what to do."""
STEPS = {"tiny": 400, "layers": 100, "convolutions": 4}
"""Steps in a block, which takes about 50 ms."""
COUNTING = ("valgrind", "-q", "--tool=callgrind", "--instr-atstart=no")


def net(name: str, device: str) -> tuple[Any, Any]:
    """Builds a model and a batch."""
    import torch
    from torch import nn

    if name == "tiny":
        model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)
    elif name == "layers":
        layers = (nn.Linear(64, 64) for _ in range(12))
        model, x = nn.Sequential(*layers, nn.Linear(64, 1)), torch.randn(32, 64)
    else:
        convolutions = (nn.Conv2d(3 if n == 0 else 16, 16, 3) for n in range(6))
        model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 20 * 20, 10))
        x = torch.randn(8, 3, 32, 32)
    return model.to(device), x.to(device)


def train(name: str, blocks: Iterator[int]) -> None:
    """Trains like an ordinary script. After each requested block, prints how long it took."""
    began_s = time.process_time()
    import torch

    torch_s = time.process_time() - began_s
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = net(name, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def seconds() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    for steps in blocks:
        began = seconds()
        for _ in range(steps):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        took_s = seconds() - began
        times = {"began_s": began_s, "torch_s": torch_s, "took_s": took_s}
        print(json.dumps(times), flush=True)


class ScriptProcess:
    """A process that trains on request; `under` is the command that starts its Python."""

    def __init__(self, name: str, store: str | None, under: Sequence[str] = ()) -> None:
        command = [*under, sys.executable, __file__, "--train", name]
        by = [] if store is None else [sys.executable, "-m", "advisor", "run", "--cache", store]
        words = command if store is None else [*by, "--", *command]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def steps(self, number: int) -> dict[str, float]:
        """Makes some steps. Returns the times that the script printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        times: dict[str, float] = json.loads(self._process.stdout.readline())
        return times

    def count(self, on: str) -> None:
        """Turns callgrind's instruction counting 'on' or 'off'."""
        words = ["callgrind_control", "-i", on, str(self._process.pid)]
        subprocess.run(words, capture_output=True, check=True)

    def end(self) -> str:
        """Ends the process. Returns its stderr."""
        return self._process.communicate()[1]


def store_unmodified(name: str, store: str) -> None:
    """Stores a record for a net, with the unmodified script as its best config."""
    from advisor.open_store import open_records

    least = ["--effort", "quick", "--no-verify", "--no-compile", "--trials", "1", "--budget", "5s"]
    command = ["--", "python", __file__, "--train", name, "--forever"]
    words = [sys.executable, "-m", "advisor", "tune", "--cache", store, *least, *command]
    subprocess.run(words, env=with_python(), stdout=subprocess.DEVNULL, check=True)
    records = open_records(store)
    (record,) = records.all()
    winners = (dataclasses.replace(one, choice=record.baseline) for one in record.winners)
    records.put(dataclasses.replace(record, winners=tuple(winners)), revises=record)


def with_python() -> Mapping[str, str]:
    """Returns an environment in which `python` is this interpreter."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": folders}


def compare_steps(name: str, turns: int, stores: Mapping[str, str | None]) -> dict[str, Any]:
    """Measures the time of a step in each way, relative to the unmodified script."""
    scripts = {way: ScriptProcess(name, store) for way, store in stores.items()}
    for one in scripts.values():
        one.steps(DECIDED + STEPS[name])
    measured: dict[str, list[float]] = {way: [] for way in scripts}
    for turn in range(turns):
        for way in list(scripts) if turn % 2 == 0 else reversed(scripts):
            measured[way].append(scripts[way].steps(STEPS[name])["took_s"])
    errors = {way: one.end() for way, one in scripts.items()}
    assert "was not tuned" in errors[UNKNOWN], errors[UNKNOWN]
    assert not errors[KNOWN], errors[KNOWN]
    us = {way: round(1e6 * min(took) / STEPS[name], 2) for way, took in measured.items()}
    plain = measured.pop(PLAIN)
    ratios = {
        way: summary([t / p for t, p in zip(took, plain, strict=True)])
        for way, took in measured.items()
    }
    return {"net": name, "turns": turns, "least_us_a_step": us, "time_over_as_it_is": ratios}


def count_instructions(name: str, steps: int, stores: Mapping[str, str | None]) -> dict[str, Any]:
    """Counts the instructions of a step in each way, relative to the unmodified script."""
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, store in stores.items():
            file = Path(folder) / "counts"
            script = ScriptProcess(name, store, [*COUNTING, f"--callgrind-out-file={file}"])
            script.steps(DECIDED + STEPS[name])
            script.count("on")
            script.steps(steps)
            script.count("off")
            errors = script.end()
            assert ("was not tuned" in errors) == (way == UNKNOWN), errors
            lines = file.read_text().splitlines()
            (total,) = (int(one.split()[1]) for one in lines if one.startswith("totals: "))
            counts[way] = total / steps
    ratios = {way: round(one / counts[PLAIN], 5) for way, one in counts.items() if way != PLAIN}
    rounded = {way: round(one) for way, one in counts.items()}
    return {"net": name, "counted": steps, "instructions_a_step": rounded, "over_as_it_is": ratios}


def summary(ratios: list[float]) -> dict[str, Any]:
    from advisor.tuners.search.ratio import ratio_of

    ratio = ratio_of([math.log(one) for one in ratios])
    interval = [round(one, 4) for one in (ratio.low, ratio.high)]
    return {"median": round(statistics.median(ratios), 4), "99%": interval}


def measure_starts(turns: int, stores: Mapping[str, str | None]) -> dict[str, Any]:
    """Measures the CPU time of a start in each way, in ms."""
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in stores}
    for turn in range(turns):
        for way in list(stores) if turn % 2 == 0 else reversed(stores):
            script = ScriptProcess("tiny", stores[way])
            first, then = script.steps(1), script.steps(DECIDED - 1)
            measured[way].append(
                {
                    "before its first line": first["began_s"],
                    "import torch": first["torch_s"],
                    f"steps 2 to {DECIDED}": then["took_s"],
                }
            )
            script.end()
    least = {
        way: {what: round(1e3 * min(one[what] for one in runs), 1) for what in runs[0]}
        for way, runs in measured.items()
    }
    return {"turns": turns, "least_ms": least}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--nets", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--counted", type=int, default=0, help="steps to count instructions of")
    parser.add_argument("--train", choices=STEPS, help="run as the script")
    parser.add_argument("--forever", action="store_true")
    args = parser.parse_args()
    if args.train:
        with contextlib.suppress(BrokenPipeError):
            train(args.train, iter([10**9]) if args.forever else map(int, sys.stdin))
        return
    for name in args.nets:
        with tempfile.TemporaryDirectory() as folder:
            stores = {PLAIN: None, AGAIN: None, UNKNOWN: f"{folder}/none", KNOWN: f"{folder}/one"}
            store_unmodified(name, f"{folder}/one")
            if args.turns:
                report(compare_steps(name, args.turns, stores), args.results)
            if args.counted:
                report(count_instructions(name, args.counted, stores), args.results)
            if name == "tiny" and args.starts:
                report({"starts": measure_starts(args.starts, stores)}, args.results)


def report(row: dict[str, Any], results: Path | None) -> None:
    """Prints a result, and appends it to the results file if there is one."""
    row = {"load": round(os.getloadavg()[0], 1), "cores": os.cpu_count(), **row}
    print(json.dumps(row, indent=1), flush=True)
    if results:
        with results.open("a") as file:
            options = " ".join(sys.argv[1:]).partition("--results")[0].strip()
            command = f"python benchmarks/runs/overhead.py {options}".strip()
            file.write(json.dumps({"command": command, **row}) + "\n")


if __name__ == "__main__":
    main()
