"""What the pilot costs where there is nothing to do: steps/s of a small net, by turns, and a start.

    python benchmarks/runs/overhead.py --results overhead.jsonl

The net is bound by the host, where a microsecond of Python a step shows. `advisor run` finds
nothing for it and leaves; so the two ought to be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def train(steps: int) -> None:
    """An ordinary script: its own seconds of importing torch, and steps/s of its last half."""
    began = time.perf_counter()
    import torch
    from torch import nn

    loaded = time.perf_counter() - began
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(32, 64, device=device)
    for step in range(steps):
        if step == steps // 2:
            _wait(device)
            began = time.perf_counter()
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    _wait(device)
    rate = (steps - steps // 2) / (time.perf_counter() - began)
    print(json.dumps({"loaded_s": loaded, "steps_per_s": rate}))


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def ran(words: list[str], environment: dict[str, str]) -> dict[str, float]:
    said = subprocess.run(
        words, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--train", action="store_true", help="only be the script")
    args = parser.parse_args()
    if args.train:
        train(args.steps)
        return
    command = [sys.executable, __file__, "--train", "--steps", str(args.steps)]
    ways = {
        "as it is": command,
        "advisor run": [sys.executable, "-m", "advisor", "run", "--", *command],
    }
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as store:
        for turn in range(args.rounds):
            for way in list(ways) if turn % 2 == 0 else reversed(list(ways)):
                seen[way].append(ran(ways[way], {"ADVISOR_CACHE": store}))
    alone, under = seen["as it is"], seen["advisor run"]
    ratios = [u["steps_per_s"] / a["steps_per_s"] for u, a in zip(under, alone, strict=True)]
    later = [u["loaded_s"] - a["loaded_s"] for u, a in zip(under, alone, strict=True)]
    row = {
        "steps_per_s": {way: [round(one["steps_per_s"], 1) for one in seen[way]] for way in ways},
        "ratio": {
            "median": round(statistics.median(ratios), 4),
            "of each turn": [round(one, 4) for one in ratios],
        },
        "import_torch_later_ms": [round(1000 * one, 1) for one in later],
    }
    print(json.dumps(row, indent=1))
    if args.results:
        with args.results.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
