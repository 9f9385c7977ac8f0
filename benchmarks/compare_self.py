"""How often `advisor compare` is wrong: a script against itself, and against a planted slowdown.

    python benchmarks/compare_self.py --repeats 20 > compare_self.jsonl
    python benchmarks/compare_self.py --repeats 20 -- python train.py --epochs 100

Without a command, both sides train a small transformer on the GPU, or a small network on the CPU.
The slow side waits after each step, for 5% of a step's time by default. With a command of your own,
only the command against itself is repeated. Prints one JSON line for each comparison, and on stderr
how many verdicts were right. On a GPU the aims are, of 20 repeats: 15 or more `same within 1%` and
at most one `faster` or `slower` against itself; 19 or more `slower` for the planted slowdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import Counter, deque

import torch
from torch import nn

LAST = 5
"""Steps whose median time is a step's time: the first steps are slower, and one in which the other
side trains takes long."""


def train(slower: float) -> None:
    """Train without end, and after each step wait `slower` times a step's time."""
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    width, length, batch = (1024, 512, 16) if gpu else (64, 32, 8)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(8, batch, length, width, device=device)
    times = deque[float](maxlen=LAST)
    for step in itertools.count():
        began = time.perf_counter()
        x = data[step % len(data)]
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # on both sides: the wait would otherwise hide behind the GPU's work
        times.append(time.perf_counter() - began)
        until = time.perf_counter() + slower * statistics.median(times)
        while time.perf_counter() < until:
            pass


def compared(first: list[str], second: list[str], budget: str) -> dict[str, object]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "advisor", "compare", "--json", "--budget", budget]
    done = subprocess.run(
        [*command, "--", *first, "--", *second], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"verdict": "failed", "reason": done.stderr.splitlines()[-1]}
    found = json.loads(done.stdout)
    kept = {name: found[name] for name in ("verdict", "ratio", "reason", "turns", "measured_s")}
    return kept | {"seconds": round(time.perf_counter() - began, 1), "losses": found["losses"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--slower", type=float, default=0.05, help="share of a step, default 0.05")
    parser.add_argument("--only", choices=("self", "planted"))
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="after --; default: a script of this file")
    args = parser.parse_args()
    if args.train is not None:
        train(args.train)
    own = [sys.executable, __file__, "--train"]
    pairs = {"self": ([*own, "0"], [*own, "0"]), "planted": ([*own, "0"], [*own, str(args.slower)])}
    if args.command:
        pairs = {"self": (args.command, args.command)}
    pairs = {what: pair for what, pair in pairs.items() if args.only in (None, what)}
    verdicts = {what: Counter[str]() for what in pairs}
    for number in range(args.repeats):
        for what, (first, second) in pairs.items():
            found = compared(first, second, args.budget)
            verdicts[what][str(found["verdict"])] += 1
            print(json.dumps({"what": what, "repeat": number, **found}), flush=True)
    for what, counts in verdicts.items():
        print(f"{what}: {dict(counts)}", file=sys.stderr)


if __name__ == "__main__":
    main()
