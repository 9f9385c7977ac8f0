"""What the pilot costs where there is nothing to do: a step, and a start.

    python benchmarks/runs/overhead.py --results overhead.jsonl

Steps: the same script runs unmodified twice, under `advisor run` with an empty store, and with a
record whose best is the unmodified script. All are there at once, and make a block of steps in turn
while the others wait, so that what the machine does to one it does to all; a ratio is that of two
blocks of one turn, and that of the two as they are is the noise. On a CPU the seconds are the
process's own.

Instructions, where valgrind is there and they are asked for: those of the process's own code in a
block of steps, as callgrind counts them. They are the same whatever else the machine does, so that
far less than 1% shows where seconds cannot tell it; what an instruction waits for is not in them.

    python benchmarks/runs/overhead.py --nets tiny --turns 0 --starts 0 --counted 200

Starts: the CPU seconds of a process before its script's first line, those of `advisor run` itself
included; for `import torch`; and for steps 2 to 8, within which all is looked up. The least of some
turns.
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
STARTED = 8
"""Steps after which the advice is in force, or is not."""
STEPS = {"tiny": 400, "layers": 100, "convolutions": 4}
"""Of a block: some 50 ms."""
COUNTING = ("valgrind", "-q", "--tool=callgrind", "--instr-atstart=no")


def net(name: str, device: str) -> tuple[Any, Any]:
    """A model and its batch."""
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


def train(name: str, asked: Iterator[int]) -> None:
    """An ordinary script, but that it says what so many steps took."""
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

    for steps in asked:
        began = seconds()
        for _ in range(steps):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        took_s = seconds() - began
        said = {"began_s": began_s, "torch_s": torch_s, "took_s": took_s}
        print(json.dumps(said), flush=True)


class Script:
    """The script in a process, which makes steps when it is told to; `under`: what runs it."""

    def __init__(self, name: str, store: str | None, under: Sequence[str] = ()) -> None:
        command = [*under, sys.executable, __file__, "--train", name]
        by = [] if store is None else [sys.executable, "-m", "advisor", "run", "--cache", store]
        words = command if store is None else [*by, "--", *command]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def steps(self, number: int) -> dict[str, float]:
        """What these took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        said: dict[str, float] = json.loads(self._process.stdout.readline())
        return said

    def count(self, on: str) -> None:
        """Have callgrind, under which it runs, count instructions from here on, or no more."""
        words = ["callgrind_control", "-i", on, str(self._process.pid)]
        subprocess.run(words, capture_output=True, check=True)

    def end(self) -> str:
        """What it said on stderr."""
        return self._process.communicate()[1]


def tuned(name: str, store: str) -> None:
    """Keep a record for a net, and make the unmodified script its best."""
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
    """An environment in which `python` is this one."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": folders}


def in_turn(name: str, turns: int, stores: Mapping[str, str | None]) -> dict[str, Any]:
    """What a step takes in each way, against the unmodified script."""
    scripts = {way: Script(name, store) for way, store in stores.items()}
    for one in scripts.values():
        one.steps(STARTED + STEPS[name])
    seen: dict[str, list[float]] = {way: [] for way in scripts}
    for turn in range(turns):
        for way in list(scripts) if turn % 2 == 0 else reversed(scripts):
            seen[way].append(scripts[way].steps(STEPS[name])["took_s"])
    errors = {way: one.end() for way, one in scripts.items()}
    assert "was not tuned" in errors[UNKNOWN], errors[UNKNOWN]
    assert not errors[KNOWN], errors[KNOWN]
    us = {way: round(1e6 * min(took) / STEPS[name], 2) for way, took in seen.items()}
    plain = seen.pop(PLAIN)
    ratios = {
        way: summary([t / p for t, p in zip(took, plain, strict=True)])
        for way, took in seen.items()
    }
    return {"net": name, "turns": turns, "least_us_a_step": us, "time_over_as_it_is": ratios}


def counted(name: str, steps: int, stores: Mapping[str, str | None]) -> dict[str, Any]:
    """What a step takes in instructions in each way, against the unmodified script."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, store in stores.items():
            file = Path(folder) / "counts"
            script = Script(name, store, [*COUNTING, f"--callgrind-out-file={file}"])
            script.steps(STARTED + STEPS[name])
            script.count("on")
            script.steps(steps)
            script.count("off")
            errors = script.end()
            assert ("was not tuned" in errors) == (way == UNKNOWN), errors
            lines = file.read_text().splitlines()
            (total,) = (int(one.split()[1]) for one in lines if one.startswith("totals: "))
            found[way] = total / steps
    ratios = {way: round(one / found[PLAIN], 5) for way, one in found.items() if way != PLAIN}
    whole = {way: round(one) for way, one in found.items()}
    return {"net": name, "counted": steps, "instructions_a_step": whole, "over_as_it_is": ratios}


def summary(ratios: list[float]) -> dict[str, Any]:
    from advisor.tuners.search.ratio import ratio_of

    found = ratio_of([math.log(one) for one in ratios])
    interval = [round(one, 4) for one in (found.low, found.high)]
    return {"median": round(statistics.median(ratios), 4), "99%": interval}


def starts(turns: int, stores: Mapping[str, str | None]) -> dict[str, Any]:
    """What a start takes in each way, in ms of CPU time."""
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in stores}
    for turn in range(turns):
        for way in list(stores) if turn % 2 == 0 else reversed(stores):
            script = Script("tiny", stores[way])
            first, then = script.steps(1), script.steps(STARTED - 1)
            seen[way].append(
                {
                    "before its first line": first["began_s"],
                    "import torch": first["torch_s"],
                    f"steps 2 to {STARTED}": then["took_s"],
                }
            )
            script.end()
    least = {
        way: {what: round(1e3 * min(one[what] for one in said), 1) for what in said[0]}
        for way, said in seen.items()
    }
    return {"turns": turns, "least_ms": least}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--nets", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--counted", type=int, default=0, help="steps whose instructions are")
    parser.add_argument("--train", choices=STEPS, help="only be the script")
    parser.add_argument("--forever", action="store_true")
    args = parser.parse_args()
    if args.train:
        with contextlib.suppress(BrokenPipeError):
            train(args.train, iter([10**9]) if args.forever else map(int, sys.stdin))
        return
    for name in args.nets:
        with tempfile.TemporaryDirectory() as folder:
            stores = {PLAIN: None, AGAIN: None, UNKNOWN: f"{folder}/none", KNOWN: f"{folder}/one"}
            tuned(name, f"{folder}/one")
            if args.turns:
                report(in_turn(name, args.turns, stores), args.results)
            if args.counted:
                report(counted(name, args.counted, stores), args.results)
            if name == "tiny" and args.starts:
                report({"starts": starts(args.starts, stores)}, args.results)


def report(row: dict[str, Any], results: Path | None) -> None:
    """Print one result and, where there is a file for it, keep it."""
    row = {"load": round(os.getloadavg()[0], 1), "cores": os.cpu_count(), **row}
    print(json.dumps(row, indent=1), flush=True)
    if results:
        with results.open("a") as file:
            given = " ".join(sys.argv[1:]).partition("--results")[0].strip()
            command = f"python benchmarks/runs/overhead.py {given}".strip()
            file.write(json.dumps({"command": command, **row}) + "\n")


if __name__ == "__main__":
    main()
